"""The other end of hosts.process: `python -m manyhands.hosts.child FD PARENT NAME` runs the function that arrives on FD.

NAME is for people who look at a list of processes.

Started with a plain exec, so a user's script is never imported twice and needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import cloudpickle


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the whole run: the parent decides
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan, even when the parent is killed
        if os.getppid() != int(sys.argv[2]):
            sys.exit(0)  # the parent died before the line above
    connection = Connection(int(sys.argv[1]))
    try:
        function, arguments = cloudpickle.loads(connection.recv_bytes())
        function(connection, *arguments)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent hung up: nothing left to do
    except BaseException:
        with contextlib.suppress(OSError):  # the parent hung up: it knows enough
            connection.send_bytes(b"E" + traceback.format_exc().encode())
        sys.exit(1)


if __name__ == "__main__":
    main()
