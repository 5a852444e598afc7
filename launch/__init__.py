"""Starts the ranks of a job on one host or several, forwards their output, and ends them together.

Words
  rank         one process of the job; there are N of them, numbered from 0. One GPU each, or CPU
               only
  identity     the variables that identify a rank: RANK, WORLD_SIZE, HOROVOD_RANK and so on
  rendezvous   a small key-value server in the launcher, on loopback only, through which the ranks
               find each other
  first host   in a job of several hosts, the host whose launcher decides for all and shows the
               output
  supervisor   a helper process between launcher and ranks that lets no descendant escape
  root cause   the rank that failed first; others that fail because it is gone are its victims
  run          a run of a session, or anything else that all ranks carry out together (agreeing,
               saving, restoring)
  stall        ranks wait in a run for others that don't come
  attempt      the ranks from their start to their end; with --max-restarts a job may have several
  preemption   a job is told to stop, and saves first

How many ranks
  -np sets the number. Without it the launcher starts one rank for each device in
  CUDA_VISIBLE_DEVICES; if that isn't set, one for each GPU that NVIDIA_VISIBLE_DEVICES leaves
  visible; if that isn't set either, one for each GPU that the driver reports. Without any GPU it
  starts one CPU rank. If there are GPUs, -np can't be larger than their number; --device cpu hides
  them (one CPU rank unless -np says more) and allows any number. A GPU split into MIG instances
  counts once unless CUDA_VISIBLE_DEVICES names the instances.
  On a host with several processors (NUMA nodes), a rank with a GPU uses the cores near that GPU, as
  NVIDIA's driver tells them, and so the memory there; --bind none lets it use all cores. --dry-run
  shows the cores. CPU ranks aren't bound.

Several hosts
  On each host: --nnodes M --node-rank I --master-addr H, as with torchrun. From one host:
  -H h1:8,h2:8 or --hostfile FILE starts the launchers over ssh; -np is then the total number of
  ranks. Ranks are numbered host by host. The first host's launcher listens until all hosts have
  connected, only to clients that hold the job's secret (COLLECTIVE_SECRET, or a file), and decides
  for all: everything said here about ranks applies to the ranks of all hosts. Lines of rank 1 of
  host h2 begin with "[h2:1] "; --log-dir keeps them on that host.
  --check -H h1,h2 checks all hosts first, and says what would stop the job.
  A failure, a stall, or a signal to any launcher ends or stops all ranks, with the same report and
  exit code everywhere. A host whose launcher is gone, or silent for --host-timeout, is named, and
  the job ends with 137; a job that has lost a host isn't restarted.

Job files
  `collective launch job.yaml` takes the command, options and variables from a file. Options before
  or after it win over the file's; --set KEY=VALUE changes a value in it before it is checked, as
  --set hyperparameters.lr=0.1 (the value is YAML). Paths are relative to the current folder.
  --dry-run prints the resolved job, which is itself a job file. docs/guides/jobs.md has all keys.

Loaders
  --data-loaders K SCRIPT starts K more processes on this host, before the ranks. They make the
  batches that collective.data.stream takes, by collective.data.serve_stream. A loader that fails is
  started again, after 0.5, 1, 2 ... 30 seconds; one that exits with 0 isn't. All get TERM when the
  last rank has ended, and KILL after the grace. Lines of loader 1 begin with "[loader 1] ";
  --log-dir keeps them in FOLDER/loader.1. They see no GPU. On several hosts, start loaders
  yourself, and give the ranks and them COLLECTIVE_LOADERS and the secret.

Environment, read
  COLLECTIVE_LOADERS       where loaders listen that this launcher doesn't start: h1:7000,h2:7000
  COLLECTIVE_SECRET, COLLECTIVE_SECRET_FILE
                           the secret of a job of several hosts, or a file with it
  PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT, PET_NPROC_PER_NODE, NODE_RANK,
  MASTER_ADDR, MASTER_PORT
                           torchrun's, used if an option is missing
  COLLECTIVE_INDEPENDENT   1: the ranks are independent processes, as with --independent
  CUDA_VISIBLE_DEVICES     the devices: indices, UUIDs (GPU-...) or MIG ids (MIG-...), in order;
                           empty means none
  NVIDIA_VISIBLE_DEVICES   all, none, void or a list: how many GPUs a container was given
  COLUMNS                  the width of the terminal, if not the one it reports

Environment, given to each rank; the launcher's value always wins
  RANK, LOCAL_RANK         its number, and its number on its host
  WORLD_SIZE, LOCAL_WORLD_SIZE
                           N, and how many ranks its host has
  COLLECTIVE_HOSTS         how many hosts the job has
  CUDA_VISIBLE_DEVICES     its one device, empty for a CPU rank
  HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME,
  _CONTROLLER=gloo, _CPU_OPERATIONS=gloo, _GLOO_RENDEZVOUS_ADDR, _GLOO_RENDEZVOUS_PORT,
  _GLOO_IFACE=lo
                           the same for Horovod, and where the rendezvous is; the interface that
                           leads to other hosts, if there are any
  COLLECTIVE_GLOO_ADDRESS, LD_PRELOAD
                           where Horovod listens, and the library that makes it do so, after the
                           user's own preloads
  COLLECTIVE_LAUNCHED      1
  COLLECTIVE_PROGRESS      where it posts its progress: unnamed memory of the launcher; empty if it
                           isn't watched (--stall-timeout 0, or one rank)
  COLLECTIVE_MILESTONES    where it posts how far it has trained, and its checkpoints: also memory
  COLLECTIVE_SCRIPT_FILES  memory in which ranks record, with --as, what they do with files
  COLLECTIVE_RESTART_COUNT, COLLECTIVE_MAX_RESTARTS
                           how often the job was restarted so far, and may be
  COLLECTIVE_PREEMPT_SIGNAL
                           the name of the signal that acts like TERM
  COLLECTIVE_INDEPENDENT   1 with --independent
  COLLECTIVE_TEST_MODE     1 with --test-mode
  COLLECTIVE_HYPERPARAMETERS, COLLECTIVE_JOB_FILE
                           of a job file, in JSON: its hyperparameters, and all else that is in it
  COLLECTIVE_LOADERS, COLLECTIVE_STREAM_KEY
                           where the job's loaders listen, and the key by which they and the ranks
                           know each other; with COLLECTIVE_SECRET, a key that is made of it
  COLLECTIVE_METRICS_PORT  PORT or ADDRESS:PORT of --metrics-port, else the user's
  PYTHONPATH               first a folder with a sitecustomize that makes several ranks refuse to
                           train apart; it removes itself from the path, and runs the next one
  COLLECTIVE_TERMINAL      1 if the launcher's stderr is a terminal, else 0 (a rank's own never is);
                           then also
  COLUMNS                  the terminal's width less the prefix
  What mpirun or another outer job left (OMPI_COMM_WORLD_*, PMI*, TF_CONFIG, ...) is taken
  away.

Environment, given to each rank; the user's value wins
  OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS
                           its share of the cores that affinity and cgroup quota allow, and of
                           those near its GPU, at least 1
  HOROVOD_CYCLE_TIME       milliseconds between two of Horovod's checks for something to send: 0.1
                           if ranks exchange through it (on GPUs, or with
                           COLLECTIVE_CARRIER=horovod), 5 if shared memory is used, too
  PYTHONHASHSEED=0         makes hash() of a string, and the order of a set of strings, the same on
                           all ranks and hosts, after a restart, and in later jobs. Otherwise Python
                           uses a different seed in each process; =random asks for that
  HOROVOD_GLOO_TIMEOUT_SECONDS=660 (longer than --stall-timeout, whose report says more),
  NCCL_SOCKET_IFNAME=lo, PYTHONUNBUFFERED=1,
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (large blocks on huge pages, where the kernel lets programs
  ask for them), TF_CPP_MIN_LOG_LEVEL=2 (TensorFlow's errors, without a page of warnings from every
  rank), on GPUs CUDA_CACHE_MAXSIZE=4294967296 (bytes: room for all of TensorFlow's kernels, which
  the driver compiles for GPUs newer than TensorFlow and keeps in CUDA_CACHE_PATH, ~/.nv)

Output
  Lines of rank 1 begin with "[1] "; stdout goes to stdout, stderr to stderr. A carriage return ends
  a line as a newline does and stays one. An unfinished line is shown after a short while; if
  another rank writes meanwhile, a newline comes first. --log-dir keeps the bytes as they were
  written. A job of one rank has no prefix and reads the launcher's stdin; the ranks of a larger job
  read /dev/null, and their script has to be a file. A slow reader slows the ranks, as it would
  without a launcher; a reader that goes away ends the job.

  On a terminal the launcher says "starting 2 ranks on 2 cores", because Python and TensorFlow take
  seconds to start; elsewhere only if there are more than two CPU ranks per core. Not with
  --tee none.

Stderr, condensed
  Output that N ranks write identically is shown once. --verbose shows everything as it is written;
  --log-dir keeps everything in any case. Only the following is left out:
  warnings     of Python and of TensorFlow (warnings.warn, WARNING:..., W in TensorFlow's logs): a
               line that another rank has written in the previous minute.
  errors       If another rank has raised the same in the previous minute (the class, and the
               script's line), only those lines of the message are shown that are new, and then a
               line that names the ranks. Lines within a second after an error, without a pause,
               count as its message. A rank that raises the same error again shows it again.
  interrupts   After Ctrl-C, tracebacks with only KeyboardInterrupt and lost peers are replaced by a
               line that says where the ranks were.
  lost peers   If a rank has failed for its own reasons, tracebacks of others about its loss only
               (Horovod's error, RankError) are replaced by a line that says where they were. Such a
               traceback is held for up to 5 seconds for a cause; without one it is shown.
  stacks       of an error that this library raises: its message is enough. The script's line is
               shown.
  deprecations TensorFlow's warnings of functions that another release may lack: one line for all.
  bars         Progress bars of tqdm and Keras: shown only for the first rank shown.
  noise        On ranks without a GPU: TensorFlow can't register the cuDNN, cuFFT and cuBLAS
               factories because they are registered already.

Exit codes
  0            every rank exited with 0
  the rank's   a rank failed: the exit code of the root cause, 128 + signal number if a signal ended
               it
  128 + signal the launcher itself was told to stop by INT, TERM, HUP or QUIT, even if the ranks
               then exited with 0; but an earlier failure counts. 143 is also the code after
               --preempt-signal, and of ranks that were told to stop by TERM
  124          the job stalled (--stall-timeout), as with timeout(1)
  141          the reader of the output is gone (128 + SIGPIPE)
  137          the supervisor was killed, or a host was lost
  126, 127     the interpreter can't be started, or doesn't exist
  2            bad usage: one sentence on stderr, nothing was started; also if one of several
               hosts can't take part

What happens when
  ranks train apart        An optimizer updates variables outside of strategy.scope(), and the
                           script hasn't called Horovod's init(): each rank would train a separate
                           model, and all would save into one folder. That is an error on each of
                           several ranks, also in scripts that never import this package.
                           --independent allows it. So does --as.
  a rank fails             (an exit code other than 0, or a signal) the others get TERM, and KILL
                           after --grace seconds. The report on the root cause comes last: where in
                           the script, and 20 lines of its stderr (or stdout if only that says why),
                           from the exception's own line on without stacks, or the last lines if it
                           didn't end with an exception: with code 1 and at most 50 lines after it,
                           or with another code and nothing after it. If a rank's last words say
                           that it lost a peer, the launcher waits up to 3 seconds for that peer to
                           fail, too: Horovod's errors can overtake their cause.
  a rank leaves with 0     while others work: nothing. If others fail later, the report says that
                           it left early. With --max-restarts it says how the job continues: see
                           Restarts.
  TERM, or INT (Ctrl-C)    is passed on to the ranks, as TERM for --preempt-signal: see Preemption.
                           Ranks that are still there after 60 seconds, or --grace if it is given,
                           get KILL; after INT first TERM, and KILL after another grace. A second
                           INT or TERM kills at once, also a TERM after an INT; except for a TERM
                           within a second of a TERM, and the first such signal to the launcher of
                           another host.
  HUP or QUIT              is passed on to the ranks' process groups; ranks that are still there
                           after the grace get TERM, and KILL after another grace. HUP is ignored
                           under nohup.
  the launcher is killed   (KILL) the supervisor kills everything below it at once. Children of
                           ranks survive only if launcher and supervisor are killed at the same
                           moment.
  the supervisor is killed the kernel kills the ranks, the launcher the rest.
  ranks leave children     behind: when the last rank has ended they get TERM, and KILL after the
                           grace, in whatever session they are. Processes that others started for
                           a rank (docker, systemd, cron) aren't below it.
  ranks wait in a run      for others: after 60 s a warning, once for each missing rank; after
                           --stall-timeout TERM, and KILL after the grace, to all, and a report that
                           comes last: which rank is missing, what each rank does, in which fetches
                           and collectives, and since when. A rank is missing if it isn't in a run,
                           whatever else it does, or if it is still in a run that others have
                           finished. If all are in the same run, that is a stall, too: a run must
                           take less than the timeout. A rank that works for all ranks (it
                           initialises, saves, restores, exports) may keep the others waiting for
                           six timeouts, an hour by default. On GPUs, so may the first run of its
                           kind: the driver may be compiling TensorFlow's kernels.
  no rank is in a run      nothing, however long: they prepare data, or are being debugged. (If you
                           stop only some of them in a debugger, use --stall-timeout 0.)

Restarts
  With --max-restarts K a job that has failed or stalled is restarted up to K times: all ranks
  again, with another rendezvous. The script must resume from its latest checkpoint, as
  MonitoredTrainingSession(checkpoint_dir=...) and Estimators do. The report on the failure says
  which restart it is, and from which step. The launcher waits 1, 2, 4 ... 60 seconds before each
  restart (--restart-pause sets the first). --log-dir continues with the same files. There is no
  restart
    of a job that was told to stop, or of which a rank was: by Ctrl-C, TERM or --preempt-signal
    at the second failure in a row after the same step, with no newer checkpoint; a script that
      trains outside of scope() (by Horovod, or with --independent) shows no steps, and fails
      "before the first step"
    of a program that can't be started, or that ends before its first step with exit code 2, a
      SyntaxError or an ImportError
    if a rank has written a line in which the regular expression of --no-restart-after is found
  With --elastic the restart has the remaining ranks, at least --min-np: on CPUs one less, unless it
  was a stall; on GPUs as many as are visible then, up to the number at first, without a device
  whose rank was the root cause twice in a row. With fewer the job ends.
  With --leave-out-host-after a host on which a rank has written such a line is left out: the
  launcher that started the hosts, by -H, starts the others again, without a pause. Elsewhere the
  job ends, and the report names the host.

Manifests
  --emit prints a manifest with which a scheduler runs this same command line on several hosts, and
  starts nothing: trainjob and mpijob for Kubernetes, slurm, compose. Its own options say how many
  hosts there are and what each has; all other options, and the command, are in the manifest
  unchanged. The script may be in the image: it isn't looked for here. A job file becomes options
  and variables. optimizationjob, for Kubernetes, searches hyperparameters that are ranges in one.

Preemption
  A rank that trains within scope() treats TERM, --preempt-signal and, from this launcher, INT as a
  request to stop, from its first run on: all ranks learn of it before the next run, complete that
  run, and stop. A MonitoredTrainingSession and an Estimator then save, and the program ends with
  exit code 143 (130 after INT); a plain session gets collective.Preempted from its next run, and
  may save. It doesn't matter whether the launcher, one rank, or all of them are signalled: signals
  within two seconds are the same request. A second signal ends a rank at once. Before its first
  run, and in scripts without scope(), signals do what they always do; a handler of the script's own
  is kept. INT and TERM go only to the ranks, so that the processes they have started work until the
  ranks have saved; with --no-python they go to the process groups.
"""
