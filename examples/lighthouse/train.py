"""Train an agent for an environment of your own:  python examples/lighthouse/train.py

A run directory appears under runs/; `resume`, `evaluate` and the plots work as with any other run.
"""

from lighthouse import Lighthouse

import manyhands as mh

run = mh.train("cartpole-ppo", env=Lighthouse, name="lighthouse", total_steps=200_000, algorithm={"value_coef": 0.5})
result = run.evaluate(episodes=100)
print(f"mean return {result.mean:.2f} over {result.episodes} episodes (1 - 0.01 per step is the best possible)")
