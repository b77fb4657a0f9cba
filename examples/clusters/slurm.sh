#!/bin/bash
# A run that goes on by itself after its time limit: sbatch slurm.sh recipe=boston …
#SBATCH --job-name=dpframe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4     # one rank a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@120       # two minutes before that: dpframe saves, and ends with code 138
#SBATCH --requeue
#SBATCH --open-mode=append
run=outputs/$SLURM_JOB_NAME-$SLURM_JOB_ID # on a file system that all nodes see
where=hydra.run.dir=$run
[ -e "$run/checkpoints/last.ckpt" ] && where=resume=$run
srun --kill-on-bad-exit=1 python -m dpframe strategy=ddp "$where" "$@"
code=$?
# 143: srun has ended the other ranks before they left by themselves.
if [ $code = 138 ] || { [ $code = 143 ] && tail -n 4 "$run/run.log" | grep -q SIGUSR1; }; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
