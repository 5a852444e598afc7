"""The text of `collective launch --help`: one line per option. `--help all` is the manual."""

from __future__ import annotations

_TEXT = """\
usage: {prog} [options] {{script.py | python3 script.py | -m module}} [arguments]
       {prog} [options] --no-python program [arguments]
       {prog} [options] job.yaml [--set KEY=VALUE] [options]

Starts the ranks of a job, forwards their output, and ends them together.

Ranks
  -np N, -n N           how many here; auto (default): one per visible GPU, else one; gpu; cpu
  --device WHAT         cpu: hide the GPUs; gpu: require them; auto (default)
  --bind none           let ranks use all cores; auto (default): those near a rank's GPU
  --data-loaders K SCRIPT  also start K processes that make batches (collective.data.stream)
  --as FRAMEWORK        run an unchanged script of deeprec, distributed-embeddings, hybridbackend,
      horovod, sok or tfra
  --embedding-scope auto  with --as: make tables of the script's embeddings, without changes to it
  --no-python           run a program that isn't a Python script
  --independent         let each rank train its own model, as in a sweep
Output
  --log-dir FOLDER      also keep the output, as FOLDER/rank.N/stdout and stderr
  --tee RANKS           show only these ranks: 0, 0,2-3, all (default), none
  --metrics-port PORT   serve the job's metrics to Prometheus, on rank 0's host
  --verbose             show every line: warnings, stacks, and repeated output of ranks
Failures
  --max-restarts K      restart all ranks, up to K times, from the latest checkpoint (default: 0)
  --restart-pause TIME  pause before the first restart; then twice as long each time (default: 1)
  --elastic, --min-np A  restart with the remaining ranks, at least A
  --no-restart-after, --leave-out-host-after PATTERN  what a line of a rank means for restarts
  --stall-timeout TIME  how long ranks may wait for one another (default: 10m; 0: forever)
  --grace TIME          from TERM to KILL (default: 5, and 60 for ranks that save)
  --preempt-signal SIG  a signal at which all ranks save and stop, like TERM
Several hosts
  -H H1:K,H2:K, --hostfile FILE   start the job on these hosts by ssh, from here;
      --ssh-port, --ssh-identity-file
  --nnodes M, --node-rank I, --master-addr HOST, --master-port P   or a launcher on each host
  --standalone          one host, whatever the environment says
  --network-interface NAME, --start-timeout TIME, --host-timeout TIME, --secret-file FILE
Schedulers
  --emit KIND           print a manifest: trainjob, mpijob, slurm, compose, optimizationjob; with
      --job-name, --image, --replicas, --gpus-per-replica, --cpus-per-replica,
      --memory-per-replica, --volume, --volume-size, --secret, --own-runtime, --env NAME=VALUE
Before the start
  --test-mode           try the script: one training batch, one evaluation batch, then it saves
  --dry-run             print the plan, start nothing
  --job-schema          print the JSON schema of job files, for editors
  --check               print what is installed, what is missing, and what would stop the job
  --version             print the version of this package
  --help all            the manual: every option in full, environment, output, exit codes, restarts

TIME is in seconds, or as 90s, 10m, 2h. Example: {prog} -np 2 train.py --epochs 3
"""


def short_help(prog: str) -> str:
    """Returns the text for a launcher called `prog`; it fits on two small screens."""
    return _TEXT.format(prog=prog)
