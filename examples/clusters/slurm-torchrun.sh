#!/bin/bash
# The same ranks, started by one torchrun a node: sbatch slurm-torchrun.sh recipe=boston …
#SBATCH --job-name=dpframe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # one torchrun a node
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # which --max-restarts needs in torch 2.13
port=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$SLURM_GPUS_ON_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id "$SLURM_JOB_ID" \
    -m dpframe strategy=ddp "hydra.run.dir=outputs/$SLURM_JOB_NAME-$SLURM_JOB_ID" "$@"
