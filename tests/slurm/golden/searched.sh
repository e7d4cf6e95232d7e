#!/bin/bash
#SBATCH --job-name=crosstraffic
#SBATCH --nodes=8
#SBATCH --ntasks=32
#SBATCH --ntasks-per-node=4
#SBATCH --time=5
#SBATCH --reservation=qualify
#SBATCH --constraint=rack1|rack2
#SBATCH --output=/scratch/me/runs/search-8/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=TERM@60

set -euo pipefail

code=0
srun --mpi=none --nodes=8 --ntasks=32 --ntasks-per-node=4 --kill-on-bad-exit=1 --wait=60 \
    /scratch/me/crosstraffic/.venv/bin/crosstraffic run collectives --output /scratch/me/runs/search-8 --transport gloo || code=$?
case $code in
    0 | 2) ;; # well, or bad use: no node to look for
    *) /scratch/me/crosstraffic/.venv/bin/crosstraffic slurm bisect /scratch/me/runs/search-8 || true ;;
esac
exit "$code"
