"""Ray Train: two workers, each a process that Ray starts."""

import os
import sys
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

HERE = str(Path(__file__).parent)


def train(config):
    sys.path.insert(0, HERE)
    from consumed import arguments, consume

    args = arguments(config["words"])
    for name in args.loaders:
        consume(args, name)


if __name__ == "__main__":
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([HERE, *sys.path])}},
    )
    TorchTrainer(
        train,
        train_loop_config={"words": sys.argv[1:]},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    ).fit()
