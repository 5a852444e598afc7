"""Starts the ranks of a job on one machine, carries their output, and ends them together.

Words
  rank         one process of the job; there are N of them, numbered from 0. One GPU each, or CPU
               only
  identity     what tells a rank who it is: RANK, WORLD_SIZE, HOROVOD_RANK and so on
  rendezvous   a small key-value server in the launcher, on loopback only, by which the ranks find
               each other
  supervisor   a helper process between launcher and ranks that lets no descendant escape
  root cause   the rank that failed first; others that fail because it is gone are its victims
  run          a run of a session, or whatever else all ranks carry out together (agreeing, saving,
               restoring)
  stall        ranks wait in a run for others that don't come

How many ranks
  -np says it. Without it: one for each device in CUDA_VISIBLE_DEVICES; if that isn't set, one for
  each GPU that NVIDIA_VISIBLE_DEVICES left visible; if that isn't set either, one for each GPU that
  the driver reports. No GPU at all makes one CPU rank. Where there are GPUs, -np can't ask for more
  ranks than GPUs; --device cpu hides them (one CPU rank unless -np says more) and allows any
  number. A GPU split into MIG instances counts once unless CUDA_VISIBLE_DEVICES names the
  instances.

Environment, read
  CUDA_VISIBLE_DEVICES     the devices: indices, UUIDs (GPU-...) or MIG ids (MIG-...), in order;
                           empty means none
  NVIDIA_VISIBLE_DEVICES   all, none, void or a list: how many GPUs a container was given
  COLUMNS                  the width of the terminal, if not the one it reports

Environment, given to each rank; the launcher's value always wins
  RANK, LOCAL_RANK         its number
  WORLD_SIZE, LOCAL_WORLD_SIZE
                           N
  CUDA_VISIBLE_DEVICES     its one device, empty for a CPU rank
  HOROVOD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE, _CROSS_RANK, _CROSS_SIZE, _HOSTNAME,
  _CONTROLLER=gloo, _CPU_OPERATIONS=gloo, _GLOO_RENDEZVOUS_ADDR, _GLOO_RENDEZVOUS_PORT,
  _GLOO_IFACE=lo
                           the same for Horovod, and where the rendezvous is
  COLLECTIVE_LAUNCHED      1
  COLLECTIVE_PROGRESS      where it posts its progress: memory of the launcher, which no folder has;
                           empty if nobody looks (--stall-timeout 0, or one rank)
  COLLECTIVE_TERMINAL      1 if the launcher's stderr is a terminal, else 0 (a rank's own never is);
                           then also
  COLUMNS                  the terminal's width less the prefix
  What mpirun or another outer job left behind (OMPI_COMM_WORLD_*, PMI*, TF_CONFIG, ...) is taken
  away.

Environment, given to each rank; the user's value wins
  OMP_NUM_THREADS, TF_NUM_INTRAOP_THREADS, TF_NUM_INTEROP_THREADS
                           its share of the cores that affinity and cgroup quota leave, at least 1
  HOROVOD_CYCLE_TIME       milliseconds between two of Horovod's looks for something to send: 0.1
                           where ranks exchange through it (on GPUs, or with
                           COLLECTIVE_CARRIER=horovod), 5 where it stands beside shared memory
  HOROVOD_GLOO_TIMEOUT_SECONDS=600, NCCL_SOCKET_IFNAME=lo, PYTHONUNBUFFERED=1,
  GLIBC_TUNABLES=glibc.malloc.hugetlb=1 (large blocks on huge pages, where the kernel lets programs
  ask for them), TF_CPP_MIN_LOG_LEVEL=2 (TensorFlow's errors, without a page of warnings from every
  rank)

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
  errors       A traceback waits up to 2 seconds, and what its rank writes behind it, too. If others
               raise the same (the class, and the script's line), it is shown once, "on ranks 0-7
               alike", and of the other ranks what their messages say differently: 200 lines, at
               least one of each message, and how many more there are. What is written within a
               second behind an error, without a pause, counts as its message. A rank that raises
               the same again shows it again.
  interrupts   After Ctrl-C no traceback that has nothing but KeyboardInterrupt and lost peers, but
               a line that says where the ranks were.
  lost peers   Where a rank has failed for reasons of its own, no traceback of the others that has
               nothing but its loss (Horovod's error, RankError), but a line that says where they
               were. Such a traceback waits up to 5 seconds for a cause; without one it is shown.
  noise        On ranks without a GPU: TensorFlow can't register the cuDNN, cuFFT and cuBLAS
               factories because they are registered already.

Exit codes
  0            every rank left with 0
  the rank's   a rank failed: the exit code of the root cause, 128 + signal number if a signal ended
               it
  128 + signal the launcher itself was told to stop by INT, TERM, HUP or QUIT, even if the ranks
               then left with 0; but a failure that came before the signal counts
  124          the job stalled (--stall-timeout), as with timeout(1)
  141          nobody reads the output any more (128 + SIGPIPE)
  137          the supervisor was killed
  126, 127     the interpreter can't be started, or isn't there
  2            bad usage: one sentence on stderr, nothing was started

What happens when
  a rank fails             (a code that isn't 0, or a signal) the others get TERM and after --grace
                           seconds KILL. The report on the root cause comes last: where in the
                           script, and 20 lines of its stderr (stdout if that is empty), from the
                           exception's own line on without stacks, or the last ones if it didn't
                           end with an exception: with code 1 and at most 50 lines behind, or with
                           another code and nothing behind. If a rank's last words say that Horovod
                           lost a peer, the launcher waits up to 3 seconds for that peer to fail,
                           too: Horovod's errors can overtake their cause.
  a rank leaves with 0     while others work: nothing. If others fail later, the report names it as
                           having left early.
  INT, HUP or QUIT         is passed on to the ranks' process groups; who is there after the grace
                           gets TERM, after another one KILL. TERM: the same, KILL after one. A
                           second INT (Ctrl-C) kills at once. HUP is ignored under nohup.
  the launcher is killed   (KILL) the supervisor kills everything below it at once. Only who kills
                           launcher and supervisor at one moment leaves children of ranks behind.
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
                           six timeouts, an hour by default.
  no rank is in a run      nothing, however long: they prepare data, or are debugged. (Who stops
                           only some of them in a debugger wants --stall-timeout 0.)
  ranks on other machines  each launcher watches the ranks of its own. If the missing rank is
                           elsewhere, it says that all of its ranks are in the same run; only the
                           launcher of that machine can name it, if it watches another rank that
                           waits.
"""
