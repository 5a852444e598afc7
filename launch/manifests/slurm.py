"""A batch file for Slurm: one launcher on each host, started by srun.

The batch file turns Slurm's list of hosts into the launcher's flags. Before the time limit Slurm
sends USR1 to the batch file, which passes it on as TERM to the launcher of its host, the first one:
the ranks save and end, and the job goes back to the queue. The batch file itself has to pass it on:
srun kills all tasks at once when it gets TERM, and scancel would also signal the ranks' children.
Only USR1 starts this: TERM comes from scancel, and from Slurm when it requeues a job by itself.
"""

from __future__ import annotations

import shlex

from collective.launch.manifests.cluster_job import ClusterJob

_FIRST_PORT, _PORTS = 20000, 10000  # below those that the kernel assigns by itself

_BODY = r"""
# Launchers know each other by a secret, in the job's folder, which all hosts see.
export COLLECTIVE_SECRET_FILE="$PWD/.secret-$SLURM_JOB_ID"
export LAUNCHER_FILE="$PWD/.launcher-$SLURM_JOB_ID"
trap 'rm -f "$COLLECTIVE_SECRET_FILE" "$LAUNCHER_FILE"' EXIT
rm -f "$LAUNCHER_FILE"
(umask 077 && head -c 32 /dev/urandom | base64 >"$COLLECTIVE_SECRET_FILE") || exit 1

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=$((FIRST_PORT + SLURM_JOB_ID % PORTS))

# One launcher that ends must not take the others along: they end by themselves, after they have
# saved. The words after "launcher" are those of the command line.
srun --kill-on-bad-exit=0 --cpus-per-task=CORES bash -c '
if [ "$SLURM_NODEID" -eq 0 ]; then echo "$$" >"$LAUNCHER_FILE"; fi
exec python -m collective.launch --nnodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"' launcher \
    ARGUMENTS &
srun=$!

# The launcher on this host stops all. srun would kill all if it got TERM itself: it does only where
# no launcher has started yet.
stop() {
    signals=$((signals + 1))
    kill -TERM "$(cat "$LAUNCHER_FILE")" || kill -TERM "$srun"
} 2>/dev/null
signals=0 again=
trap stop TERM
trap 'again=1; stop' USR1
while  # a signal ends wait, not srun
    seen=$signals
    wait "$srun"
    code=$?
    [ "$signals" -ne "$seen" ]
do :; done

if [ -n "$again" ] && [ "$code" -eq STOPPED ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_text(job: ClusterJob) -> str:
    directives = [
        f"--job-name={job.name}",
        f"--nodes={job.replicas}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cores}",
    ]
    if job.gpus:
        directives.append(f"--gpus-per-node={job.gpus}")
    if job.memory:
        directives.append(f"--mem={job.memory}M")
    directives += [
        "--output=%x-%j.out",
        "--open-mode=append",  # the job may come back from the queue
        "--requeue",
        f"--signal=B:USR1@{job.seconds_to_stop}",
    ]
    header = "\n".join(["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)])
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in job.environment.items()
    )
    body = (
        _BODY.replace("FIRST_PORT", str(_FIRST_PORT))
        .replace("PORTS", str(_PORTS))
        .replace("STOPPED", str(128 + 15))
        .replace("CORES", str(job.cores))
        .replace("ARGUMENTS", shlex.join(job.arguments))
    )
    return header + "\n" + (f"\n{exports}" if exports else "") + body
