# shellcheck shell=bash
# What a job does: it trains, and asks SLURM for another start where the training was stopped or has lost peers.
# The .sbatch files beside this file read it in. Nothing in here needs to be edited.

# Each job writes to a folder of its own, and so does each task of an array. `--resume auto` then finds the job's own
# run, and not that of another job which waits for its next start. A task of an array needs both numbers for its name:
# the last task has the same SLURM_JOB_ID as the whole array.
job=${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

variant=()
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] && [ -z "$LIVE" ]; then
  read -ra variant < <(sed -n "${SLURM_ARRAY_TASK_ID}p" "${VARIANTS:-/dev/null}")
  if [ ${#variant[@]} = 0 ]; then
    echo "ddp: error: task $SLURM_ARRAY_TASK_ID of this array takes its words from line $SLURM_ARRAY_TASK_ID of the" \
      "file that VARIANTS names, but '$VARIANTS' has no such line; name another file, or ask for fewer tasks" >&2
    exit 2
  fi
fi

# srun does not take the number of cores over from sbatch. It reads this variable.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# A signal that asks the job to stop may reach this script, too. It has to stay until the ranks have saved.
trap : TERM

# The jobs of a live recovery bring nodes to one run, and have its folder in common.
shared=${LIVE:+$RUN}
folder=$OUTPUT/${shared:-$job}
# srun ends with the highest code of all tasks. After an exception on one rank that is 6, which the others end with, and
# not 2. So each task leaves its own code in this folder.
codes=$folder/exit-codes${shared:+-$job}
rm -rf "$codes" && mkdir -p "$codes" || exit 4

# --kill-on-bad-exit=0: when one rank ends, the others still get the time to notice and to save.
# --no-kill: in a job that was submitted with --no-kill, the other nodes go on after one is lost.
# The words of the command line come last, because the last of two equal options counts.
# shellcheck disable=SC2016  # the inner shell expands it, on each task's node
srun --no-kill --kill-on-bad-exit=0 "${SRUN_OPTIONS[@]}" \
  bash -c 'trap : TERM INT HUP USR1 USR2; "$@"; code=$?; echo $code >"$0/$SLURM_PROCID"; exit $code' "$codes" \
  "${DDP[@]}" train --layout ddp --output "$folder" --resume auto "${LIVE[@]}" "${variant[@]}" "$@"
code=$?

# 75: the training was stopped and has saved. 6: peers were lost. Any other end would only come again.
cause=$(cat "$codes"/* 2>/dev/null | grep -vxE '0|6|75' | head -n 1)
code=${cause:-$code}
if [ "$code" != 75 ] && [ "$code" != 6 ]; then exit "$code"; fi
# The job is RUNNING unless SLURM itself is ending it. A cancelled job has to stay cancelled, and SLURM starts a
# preempted or requeued job again without being asked.
if [ "$(squeue --noheader --jobs "$job" --format %T)" != RUNNING ]; then exit "$code"; fi
if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
  echo "ddp: error: the training ended with $code and would start again, but this job has been started again" \
    "${SLURM_RESTART_COUNT:-0} times already (MAX_REQUEUES=$MAX_REQUEUES); to continue: scontrol requeue $job" >&2
  exit "$code"
fi
scontrol requeue "$job"
exit "$code"
