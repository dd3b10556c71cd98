#!/bin/bash
# How large it is, the command line says; what follows the script goes to train.py.
#   headrace cluster batch --gpus 8 job.sh --epochs 90      a rank for each GPU
#   sbatch --nodes=2 --gpus-per-node=4 job.sh               the same
#   sbatch --ntasks-per-node=2 job.sh                       two ranks, on CPUs
#SBATCH --job-name=tensorflow
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -eu
python prepare.py data # once: from then on it finds the stores

# A rank for each GPU, or for each task where there are none.
ranks=${SLURM_GPUS_ON_NODE:-${HEADRACE_JOB_GPUS_PER_NODE:-0}}
[ "$ranks" -gt 0 ] || ranks=${SLURM_NTASKS_PER_NODE:-${HEADRACE_JOB_TASKS_PER_NODE:-1}}
exec headrace launch --framework tensorflow --ranks-per-node "$ranks" train.py "$@"
