"""Starts the ranks of a job on one host or several, carries their output, and ends them together.

Words
  rank         one process of the job; there are N of them, numbered from 0. One GPU each, or CPU
               only
  identity     what tells a rank who it is: RANK, WORLD_SIZE, HOROVOD_RANK and so on
  rendezvous   a small key-value server in the launcher, on loopback only, by which the ranks find
               each other
  first host   of a job of several, the one whose launcher decides for all and shows the output
  supervisor   a helper process between launcher and ranks that lets no descendant escape
  root cause   the rank that failed first; others that fail because it is gone are its victims
  run          a run of a session, or whatever else all ranks carry out together (agreeing, saving,
               restoring)
  stall        ranks wait in a run for others that don't come
  attempt      the ranks from their start to their end; with --max-restarts a job may have several
  preemption   a job is told to stop, and saves first

How many ranks
  -np says it. Without it: one for each device in CUDA_VISIBLE_DEVICES; if that isn't set, one for
  each GPU that NVIDIA_VISIBLE_DEVICES left visible; if that isn't set either, one for each GPU that
  the driver reports. No GPU at all makes one CPU rank. Where there are GPUs, -np can't ask for more
  ranks than GPUs; --device cpu hides them (one CPU rank unless -np says more) and allows any
  number. A GPU split into MIG instances counts once unless CUDA_VISIBLE_DEVICES names the
  instances.

Several hosts
  On each host: --nnodes M --node-rank I --master-addr H, as with torchrun. From one host:
  -H h1:8,h2:8 or --hostfile FILE starts the launchers over ssh; -np is then the number of all
  ranks. Ranks count host by host. The first host's launcher listens until all are there, to who
  holds the job's secret (COLLECTIVE_SECRET, or a file), and decides for all: what is said here of
  ranks is so of the ranks of all hosts. Lines of rank 1 of host h2 begin with "[h2:1] "; --log-dir
  keeps them there.
  --check -H h1,h2 asks all hosts first, and says what is in the job's way.
  A failure, a stall, a signal to any launcher ends or stops all, with one report and one exit code
  everywhere. A host whose launcher is gone, or says nothing for --host-timeout, is named, and the
  job ends with 137; without it there is no restart.

Environment, read
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
  RANK, LOCAL_RANK         its number, and that on its host
  WORLD_SIZE, LOCAL_WORLD_SIZE
                           N, and how many ranks its host has
  CUDA_VISIBLE_DEVICES     its one device, empty for a CPU rank
  HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME,
  _CONTROLLER=gloo, _CPU_OPERATIONS=gloo, _GLOO_RENDEZVOUS_ADDR, _GLOO_RENDEZVOUS_PORT,
  _GLOO_IFACE=lo
                           the same for Horovod, and where the rendezvous is; the interface that
                           leads to other hosts, if there are any
  COLLECTIVE_GLOO_ADDRESS, LD_PRELOAD
                           where Horovod is to listen, and the library that makes it do so, after
                           what the user preloads
  COLLECTIVE_LAUNCHED      1
  COLLECTIVE_PROGRESS      where it posts its progress: memory of the launcher, which no folder has;
                           empty if nobody looks (--stall-timeout 0, or one rank)
  COLLECTIVE_MILESTONES    where it posts how far it has trained, and its checkpoints: memory, too
  COLLECTIVE_SCRIPT_FILES  memory in which ranks note, with --as, what they do with files
  COLLECTIVE_RESTART_COUNT, COLLECTIVE_MAX_RESTARTS
                           how often the job was started again so far, and may be
  COLLECTIVE_PREEMPT_SIGNAL
                           the name of the signal that means TERM, too
  COLLECTIVE_INDEPENDENT   1 with --independent
  PYTHONPATH               first a folder with a sitecustomize, by which several ranks refuse to
                           train apart; it leaves the path again, and runs the next sitecustomize
  COLLECTIVE_TERMINAL      1 if the launcher's stderr is a terminal, else 0 (a rank's own never is);
                           then also
  COLUMNS                  the terminal's width less the prefix
  What mpirun or another outer job left (OMPI_COMM_WORLD_*, PMI*, TF_CONFIG, ...) is taken
  away.

Environment, given to each rank; the user's value wins
  OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS
                           its share of the cores that affinity and cgroup quota leave, at least 1
  HOROVOD_CYCLE_TIME       milliseconds between two of Horovod's looks for something to send: 0.1
                           where ranks exchange through it (on GPUs, or with
                           COLLECTIVE_CARRIER=horovod), 5 if shared memory is used, too
  PYTHONHASHSEED=0         so that hash() of a text, and the order of a set of texts, are the same
                           on all ranks and hosts, after a restart, and in a later job. Python
                           takes another seed in each process otherwise; =random asks for that
  HOROVOD_GLOO_TIMEOUT_SECONDS=600, NCCL_SOCKET_IFNAME=lo, PYTHONUNBUFFERED=1,
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (large blocks on huge pages, where the kernel lets programs
  ask for them), TF_CPP_MIN_LOG_LEVEL=2 (TensorFlow's errors, without a page of warnings from every
  rank), on GPUs CUDA_CACHE_MAXSIZE=4294967296 (bytes: room for all of TensorFlow's kernels, which
  the driver compiles for GPUs newer than TensorFlow 2.15 and keeps in CUDA_CACHE_PATH, ~/.nv)

Output
  Lines of rank 1 begin with "[1] "; stdout goes to stdout, stderr to stderr. A carriage return ends
  a line as a newline does and stays one. An unfinished line is shown after a short while; if
  another rank writes meanwhile, a newline comes first. --log-dir keeps the bytes as they were
  written. A job of one rank has no prefix and reads the launcher's stdin; the ranks of a larger one
  read /dev/null. A reader that is slow slows the ranks, as it would without a launcher; one that
  goes away ends the job.

  On a terminal the launcher says "starting 2 ranks on 2 cores", since Python and TensorFlow take
  seconds to start; elsewhere only if there are more than two CPU ranks a core. Not with --tee none.

Stderr, condensed
  What N ranks write alike is shown once. --verbose shows everything as it is written; --log-dir
  keeps everything in any case. Nothing but the following is left out:
  warnings     of Python and of TensorFlow (warnings.warn, WARNING:..., W in TensorFlow's logs) from
               rank 0 only. Another rank's is shown where rank 0 hasn't written the same in the
               minute before and doesn't within 10 seconds, with the names of the ranks.
  errors       A traceback waits up to 2 seconds, and what its rank writes after it, too. If others
               raise the same (the class, and the script's line), it is shown once, "on ranks 0-7
               alike", and of the other ranks what their messages say differently: 200 lines, at
               least one of each message, and how many more there are. What is written within a
               second after an error, without a pause, counts as its message. A rank that raises
               the same again shows it again.
  interrupts   After Ctrl-C no traceback that has nothing but KeyboardInterrupt and lost peers, but
               a line that says where the ranks were.
  lost peers   Where a rank has failed for reasons of its own, no traceback of the others that has
               nothing but its loss (Horovod's error, RankError), but a line that says where they
               were. Such a traceback waits up to 5 seconds for a cause; without one it is shown.
  stacks       of an error of the library's own: its message says all. The script's line is shown.
  deprecations TensorFlow's warnings of functions that another release may lack: one line for all.
  bars         Progress bars of tqdm and Keras from the first rank that is shown only.
  noise        On ranks without a GPU: TensorFlow can't register the cuDNN, cuFFT and cuBLAS
               factories because they are registered already.

Exit codes
  0            every rank left with 0
  the rank's   a rank failed: the exit code of the root cause, 128 + signal number if a signal ended
               it
  128 + signal the launcher itself was told to stop by INT, TERM, HUP or QUIT, even if the ranks
               then left with 0; but a failure that came before the signal counts. 143 is also that
               of --preempt-signal, and of ranks that were told to stop by TERM
  124          the job stalled (--stall-timeout), as with timeout(1)
  141          nobody reads the output any more (128 + SIGPIPE)
  137          the supervisor was killed, or a host was lost
  126, 127     the interpreter can't be started, or doesn't exist
  2            bad usage: one sentence on stderr, nothing was started; also where a host of several
               can't take part

What happens when
  ranks train apart        An optimizer updates variables outside of strategy.scope(), and the
                           script hasn't called Horovod's init(): each rank would train a model of
                           its own, and all would save into one folder. That is an error on each of
                           several ranks, also of scripts that never import this package.
                           --independent allows it. So does --as.
  a rank fails             (a code that isn't 0, or a signal) the others get TERM and after --grace
                           seconds KILL. The report on the root cause comes last: where in the
                           script, and 20 lines of its stderr (stdout if only that tells why), from
                           the exception's own line on without stacks, or the last ones if it didn't
                           end with an exception: with code 1 and at most 50 lines after it, or with
                           another code and nothing after it. If a rank's last words say that it
                           lost a peer, the launcher waits up to 3 seconds for that peer to fail,
                           too: Horovod's errors can overtake their cause.
  a rank leaves with 0     while others work: nothing. If others fail later, the report names it as
                           having left early.
                           With --max-restarts it says how the job goes on: see Restarts.
  TERM, or INT (Ctrl-C)    is passed on to the ranks, as TERM is for --preempt-signal: see
                           Preemption. Who is there after 60 seconds, or --grace if it is given,
                           gets KILL; after INT first TERM, and KILL after another grace. A second
                           INT or TERM kills at once, also a TERM after an INT; except for a TERM
                           within a second of a TERM, and the same signal's first one to the
                           launcher of another host.
  HUP or QUIT              is passed on to the ranks' process groups; who is there after the grace
                           gets TERM, after another one KILL. HUP is ignored under nohup.
  the launcher is killed   (KILL) the supervisor kills everything below it at once. Only who kills
                           launcher and supervisor at one moment leaves children of ranks.
  the supervisor is killed the kernel kills the ranks, the launcher the rest.
  ranks leave children     behind: when the last rank has ended they get TERM and after the grace
                           KILL, in whatever session they are. What others started for a rank
                           (docker, systemd, cron) isn't below it.
  ranks wait in a run      for others: after 60 s a warning, once for each rank that is missing;
                           after --stall-timeout TERM and after the grace KILL to all, and a report
                           that comes last: who is missing, what each rank does, in which fetches
                           and collectives, and since when. A rank is missing that is in no run,
                           whatever it does by itself, or that is still in a run which others have
                           finished. If all are in one and the same run, that is a stall, too: a run
                           must take less than the timeout. A rank that works for all by itself (it
                           initialises, saves, restores, exports) may keep the others waiting for
                           six timeouts, an hour by default. So may, on GPUs, a run as none has
                           finished before: the driver may be compiling TensorFlow's kernels.
  no rank is in a run      nothing, however long: they prepare data, or are debugged. (Who stops
                           only some of them in a debugger wants --stall-timeout 0.)

Restarts
  With --max-restarts K a job that has failed, or stalled, starts again, up to K times: all ranks
  again, with another rendezvous. The script goes on from its latest checkpoint, as
  MonitoredTrainingSession(checkpoint_dir=...) and Estimators do. The report on the failure says
  which restart it is, and from which step. It waits 1, 2, 4 ... 60 seconds before (--restart-pause
  sets the first). --log-dir goes on with the same files. There is no restart
    of a job that was told to stop, or of which a rank was: by Ctrl-C, TERM or --preempt-signal
    at the second failure in a row after the same step, with no newer checkpoint; a script that
      trains outside of scope() (by Horovod, or with --independent) shows no steps, and fails
      "before the first step"
    of a program that can't be started, or that ends before its first step with exit code 2, a
      SyntaxError or an ImportError
  With --elastic the restart has the ranks that are left, at least --min-np: of CPU ranks one less,
  if it wasn't a stall; on GPUs as many as are visible then, up to as many as at first, without one
  whose rank was the root cause twice in a row. With fewer the job ends.

Manifests
  --emit prints what a scheduler needs to run this very command line on several hosts, and starts
  nothing: trainjob and mpijob for Kubernetes, slurm, compose. Options of its own say how many hosts
  there are and what each has; all others, and the command, are in the manifest as they were given.
  The script may be in the image: nobody looks for it here.

Preemption
  A rank that trains within scope() takes TERM, --preempt-signal and, from this launcher, INT for a
  wish, from its first run on: all ranks learn of it before the next run, complete that, and stop. A
  MonitoredTrainingSession and an Estimator then save, and the program ends with exit code 143 (130
  after INT); a plain session gets collective.Preempted from its next run, and may
  save. It doesn't matter whether the launcher is signalled, one rank, or all of them: within two
  seconds that is the same wish. A second signal ends a rank at once. Before its first run, and for
  scripts without scope(), signals do what they always do; a script that handles one itself keeps
  it. INT and TERM go to the ranks alone, so that what they have started works until they have
  saved; with --no-python to their process groups.
"""
