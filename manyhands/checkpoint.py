"""Checkpoints: a folder with safetensors and a JSON manifest, complete or not there at all.

Written under a temporary name, synced, then renamed; every file's checksum is in the manifest, and the manifest's own
beside it. Loading executes nothing from the files. `latest` and `best` are links.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyhands.types import Streamed, UsageError

FORMAT = 2
TENSORS = "tensors.safetensors"
MANIFEST = "manifest.json"
STREAM_BYTES = 1 << 26  # written and read at a time


class DamagedCheckpoint(Exception):
    pass


def save(folder: Path, step: int, state: dict[str, Any], about: dict[str, Any], keep: int, best: bool) -> Path:
    """Writes folder/step-N; afterwards the newest `keep` and the best one are there. An OSError leaves all as it was."""
    final = _write(folder, f"step-{step:012d}", step, state, about)
    _link(folder / "latest", final.name)
    if best:
        _link(folder / "best", final.name)
    _forget_others(folder, keep)
    return final


def save_best(folder: Path, step: int, state: dict[str, Any], about: dict[str, Any], keep: int) -> Path:
    """Writes parameters that were judged the best so far: to play with, not to continue from."""
    final = _write(folder, f"judged-{step:012d}", step, state, about)
    _link(folder / "best", final.name)
    _forget_others(folder, keep)
    return final


def judged_best(folder: Path) -> float | None:
    """The score of the parameters that a judge found best, if one did."""
    try:
        name = os.readlink(folder / "best")
        return json.loads((folder / name / MANIFEST).read_text())["return_mean"] if name.startswith("judged-") else None
    except (OSError, ValueError, KeyError):
        return None


def _forget_others(folder: Path, keep: int) -> None:
    kept = {path.name for path in _all(folder)[-keep:]} | {
        os.readlink(folder / n) for n in ("latest", "best") if (folder / n).is_symlink()
    }
    for path in (*_all(folder), *folder.glob("judged-*")):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _write(folder: Path, name: str, step: int, state: dict[str, Any], about: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name
    temporary = folder / f".writing-{os.getpid()}-{step}"
    for leftover in folder.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir()
        tensors: dict[str, Tensor] = {}
        streams: dict[str, Tensor] = {}
        tree = _split(state, "", tensors, streams)
        save_file(tensors, temporary / TENSORS)
        sums = {name: _stream(tensor, temporary / name) for name, tensor in streams.items()}
        manifest = {
            "format": FORMAT,
            "step": step,
            **about,
            "state": tree,
            "sha256": {TENSORS: _sha256(temporary / TENSORS), **sums},
        }
        body = json.dumps(manifest, indent=1)
        digest = hashlib.sha256(body.encode()).hexdigest()
        (temporary / MANIFEST).write_text(body)
        (temporary / f"{MANIFEST}.sha256").write_text(digest)
        for file in temporary.iterdir():
            _sync(file)
        _sync(temporary)
        aside = folder / f".writing-{os.getpid()}-old"
        if final.exists():  # the same step again, after a resume
            final.rename(aside)
        temporary.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
        _sync(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def load(path: Path, streams: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, manifest) of one checkpoint, verified – the large files only where wanted; DamagedCheckpoint says what is wrong."""
    try:
        body = (path / MANIFEST).read_text()
        digest = (path / f"{MANIFEST}.sha256").read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(f"{path}: {error}") from error
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        raise DamagedCheckpoint(f"{path}/{MANIFEST}: checksum differs")
    manifest = json.loads(body)
    if manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: format {manifest.get('format')} is not {FORMAT}: it was written by another version")
    for name, expected in manifest["sha256"].items():
        file = path / Path(name).name
        if name != TENSORS and not streams:
            continue
        if not file.is_file() or _sha256(file) != expected:
            raise DamagedCheckpoint(f"{file}: missing or its checksum differs")
    return _join(manifest.pop("state"), load_file(path / TENSORS), path), manifest


def load_newest(
    folder: Path, warn: Callable[[str], None], which: str = "latest", streams: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The named checkpoint ("latest", "best" or a folder's name), or the newest good one before it, with a warning."""
    candidates = list(reversed(_all(folder)))
    if which != "latest":
        chosen = folder / which
        if not chosen.exists():
            names = ", ".join(p.name for p in candidates) or "none"
            raise UsageError(f"{folder} has no checkpoint {which!r} (there are: {names})")
        candidates = [chosen.resolve(), *(p for p in candidates if p.name < chosen.resolve().name)]
    if not candidates:
        raise UsageError(f"{folder.parent} has no checkpoint yet: nothing to continue from")
    for path in candidates:
        try:
            return load(path, streams)
        except DamagedCheckpoint as damage:
            warn(f"damaged checkpoint: {damage}; trying the one before it")
    raise UsageError(f"{folder}: every checkpoint is damaged")


def newest_step(folder: Path) -> int:
    """Of the newest checkpoint, as its name says, or -1 where there is none. Whether it is good is not looked at."""
    found = _all(folder)
    return int(found[-1].name.removeprefix("step-")) if found else -1


def newest_is_finished(folder: Path) -> bool:
    """Whether the newest checkpoint is that of a run's end."""
    found = _all(folder)
    try:
        return bool(found) and json.loads((found[-1] / MANIFEST).read_text()).get("finished", False)
    except (OSError, ValueError):
        return False


def check_same(mine: dict[str, Any], theirs: dict[str, Any], where: Path) -> None:
    """A UsageError that names what differs between who loads and what was saved."""
    differing = [f"{key} is {theirs.get(key)!r} there, {mine[key]!r} here" for key in mine if mine[key] != theirs.get(key)]
    if differing:
        hint = "; pass a custom algorithm to mh.open_run(..., algorithm=...)" if "algorithm" in differing[0] else ""
        raise UsageError(f"{where} does not fit: {'; '.join(differing)}. Nothing was loaded{hint}")


def _all(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*") if p.is_dir())


def _split(tree: Any, path: str, tensors: dict[str, Tensor], streams: dict[str, Tensor]) -> Any:
    """Tensors and arrays move into `tensors` by their path, large ones into files of their own; everything else stays JSON."""
    if isinstance(tree, Streamed):
        name = path.replace("/", ".") + ".bin"
        streams[name] = tree.tensor
        return {"$stream": name}
    if isinstance(tree, Tensor | np.ndarray):
        tensors[path] = torch.tensor(tree) if isinstance(tree, np.ndarray) else tree.detach().cpu().contiguous().clone()
        return {"$array" if isinstance(tree, np.ndarray) else "$tensor": path}
    if isinstance(tree, dict):
        return {str(k): _split(v, f"{path}/{k}" if path else str(k), tensors, streams) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_split(value, f"{path}/{i}", tensors, streams) for i, value in enumerate(tree)]
    if isinstance(tree, np.generic):
        return tree.item()
    return tree


def _join(tree: Any, tensors: dict[str, Tensor], folder: Path) -> Any:
    if isinstance(tree, dict):
        if "$stream" in tree:
            return StreamedFile(folder / Path(tree["$stream"]).name)
        if "$array" in tree:
            return tensors[tree["$array"]].numpy()
        return tensors[tree["$tensor"]] if "$tensor" in tree else {k: _join(v, tensors, folder) for k, v in tree.items()}
    return [_join(value, tensors, folder) for value in tree] if isinstance(tree, list) else tree


@dataclass(frozen=True)
class StreamedFile:
    file: Path

    def read_into(self, target: Tensor) -> None:
        flat = target.view(-1)
        there, here = self.file.stat().st_size, flat.numel() * flat.element_size()
        if there != here:
            raise UsageError(f"{self.file} has {there:,} bytes, the recipe asks for {here:,}: were settings changed?")
        with self.file.open("rb") as stream:
            for part in flat.split(STREAM_BYTES // flat.element_size()):
                values = np.fromfile(stream, _numpy_type(flat), len(part))
                part.copy_(torch.from_numpy(values).view(flat.dtype))


def _stream(tensor: Tensor, file: Path) -> str:
    """Writes the tensor's bytes a piece at a time; their checksum."""
    digest = hashlib.sha256()
    with file.open("wb") as stream:
        for part in tensor.view(-1).split(STREAM_BYTES // tensor.element_size()):
            data = part.cpu().numpy()
            digest.update(data)
            stream.write(data)
    return digest.hexdigest()


def _numpy_type(tensor: Tensor) -> np.dtype:
    return torch.zeros(0, dtype=tensor.dtype).numpy().dtype


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _link(link: Path, target: str) -> None:
    temporary = link.with_name(f".{link.name}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(link)
