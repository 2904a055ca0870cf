#!/usr/bin/env bash
# Four nodes of eight GPUs: sbatch config/slurm.sh config/30b_1m.py [--key=value ...]
# One torchrun on each node; they find each other on the first one. out_dir and the dataset must lie on a file system that all
# nodes see. A rank that dies is started again, with the others, from the last checkpoint. Two minutes before the
# time is up Slurm sends SIGTERM, which torchrun passes on (SIGUSR1 it does not): the ranks finish their step and save. A step
# that takes longer than torchrun's --shutdown-timeout (30 s) is lost. The next job goes on with --init_from=resume.
#SBATCH --job-name=memo
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=TERM@120
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ulimit -l unlimited || true  # the host slab is page-locked; where that fails the run says so

srun --cpus-per-task="$SLURM_CPUS_PER_TASK" .venv/bin/torchrun \
    --nnodes="$SLURM_NNODES" --nproc_per_node=8 --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id="$SLURM_JOB_ID" \
    train.py "$@"
