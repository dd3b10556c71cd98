#!/bin/bash
# How large it is, the command line says; what follows the script goes to train.py.
#   headrace cluster batch --gpus 8 job.sh --epochs 4       a rank for each GPU
#   sbatch --ntasks-per-node=2 job.sh                       two ranks, on CPUs
#SBATCH --job-name=gpt
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -eu
python prepare.py data # once: from then on it finds the store
exec headrace launch train.py "$@"
