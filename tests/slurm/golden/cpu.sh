#!/bin/bash
#SBATCH --job-name=crosstraffic
#SBATCH --nodes=4
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=30
#SBATCH --nodelist=c[01-04]
#SBATCH --dependency=afterany:4711
#SBATCH --output=/scratch/me/runs/cpu-4/slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --signal=TERM@120

set -euo pipefail
source /scratch/me/crosstraffic/.venv/bin/activate
module load gcc/13.2
module load openmpi/5.0

exec srun --mpi=pmix --nodes=4 --ntasks=8 --ntasks-per-node=2 --kill-on-bad-exit=1 --wait=60 --cpus-per-task=16 \
    crosstraffic run --output /scratch/me/runs/cpu-4 --transport mpi
