#!/bin/bash
#SBATCH --job-name=qualify-h100
#SBATCH --nodes=16
#SBATCH --ntasks=128
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=1:00:00
#SBATCH --account=infra
#SBATCH --partition=h100
#SBATCH --exclude=h100-[007,113]
#SBATCH --output=/shared/runs/h100-16/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=TERM@120
#SBATCH --mem=0

set -euo pipefail
export NCCL_DEBUG=WARN
export NCCL_IB_HCA=mlx5_0,mlx5_1

exec srun --mpi=none --nodes=16 --ntasks=128 --ntasks-per-node=8 --kill-on-bad-exit=1 --wait=60 '--container-image=nvcr.io#nvidia/pytorch:26.05-py3' --container-mounts=/shared:/shared \
    crosstraffic run /shared/scenarios/deepseek.toml --output /shared/runs/h100-16 --transport nccl --budget 1800
