"""Offers what a script calls: the strategy and its scopes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Callable

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import options, scope_activation, strategies
from collective.checkpoint import best
from collective.coordination import run_analysis
from collective.estimator import input_sharding
from collective.ops import collectives, graph_analysis, membership
from collective.options import (
    INHERIT,
    Carrier,
    CheckpointFailure,
    DenseCompression,
    DType,
    EmbeddingOptions,
    GradientReduction,
    Hierarchical,
    MissingSlots,
    PlanOutput,
    ScopeOptions,
    WarmStartSource,
    WireType,
)
from collective.plan import builder
from collective.plan.plan import Plan
from collective.policy import PolicyOption, TablePolicy, policy_of
from collective.scope import SCOPES, Scope
from collective.tables import lookups as _lookups  # noqa: F401 (registers the lookup functions)

if TYPE_CHECKING:
    from collective.checkpoint.best import KeepBest
    from collective.estimator.estimator import Estimator


class CollectiveStrategy:
    """Trains synchronously on all ranks of the job, with sharded embedding tables.

    The interface is DeepRec's `CollectiveStrategy`. The environment variable COLLECTIVE_STRATEGY
    names the backend, `hb` by default. A program that is started without the launcher is one rank.

        strategy = CollectiveStrategy()
        with strategy.scope(), tf.Graph().as_default():
            with strategy.embedding_scope():
                table = tf.get_variable('user', [1000000, 16])
            rows = tf.nn.embedding_lookup(table, ids)
            ...
            train_op = tf.train.AdagradOptimizer(0.05).minimize(loss)
            with tf.train.MonitoredTrainingSession('') as session:
                while not session.should_stop():
                    session.run(train_op)

    Training minimises the mean of the ranks' losses: with a mean loss over B / N samples on each of
    N ranks it takes the same steps as plain TensorFlow in one process with B samples.

    Raises:
        ValueError: COLLECTIVE_STRATEGY names no backend, or COLLECTIVE_CARRIER no carrier.
        ImportError: Horovod is needed (several hosts, no shared memory), and isn't installed.
    """

    def __init__(self) -> None:
        strategies.backend()
        collectives.init()
        scope_activation.warn_of_missing_operations()

    def world_size(self) -> int:
        """Returns N, the number of ranks."""
        return collectives.size()

    def rank(self) -> int:
        """Returns this rank, 0 ≤ rank < N."""
        return collectives.rank()

    def local_rank(self) -> int:
        """Returns this rank's number on its host."""
        return membership.local_rank()

    @options.takes_foreign(*options.names(ScopeOptions))
    def scope(
        self,
        *,
        embedding_gradients: GradientReduction = INHERIT,
        missing_slots: MissingSlots = INHERIT,
        grouping: bool = INHERIT,
        wire_dtype: WireType | DType | None = INHERIT,
        gradient_wire_dtype: WireType | DType | None = INHERIT,
        plan: PlanOutput = INHERIT,
        profile: str | os.PathLike[str] | None = INHERIT,
        profile_steps: tuple[int, int] = INHERIT,
        profile_every: int = INHERIT,
        local_steps: int = INHERIT,
        dense_compression: DenseCompression = INHERIT,
        prefetch_keys: bool = INHERIT,
        check: bool | int = INHERIT,
        deterministic: bool = INHERIT,
        carrier: Carrier | None = INHERIT,
        hierarchical: Hierarchical = INHERIT,
        warm_start: Sequence[WarmStartSource] | WarmStartSource | None = INHERIT,
        save_code: bool = INHERIT,
        checkpoint_blocking: bool = INHERIT,
        checkpoint_buffer: int | float = INHERIT,
        checkpoint_on_error: CheckpointFailure = INHERIT,
    ) -> Scope[CollectiveStrategy]:
        """Opens the data-parallel part of a program: model, optimizer and sessions.

        Inside, gradients are those of all ranks, sessions agree on every run, replicated variables
        start equal, and rank 0 alone writes summaries and logs. Leaving it restores TensorFlow as
        it was. It can be nested and entered again; inside, options that are not given stay what
        they are outside.

        It trains graphs. Eagerly (a forgotten `tf.Graph().as_default()`, `fit` of a Keras model, a
        `tf.GradientTape`, also in a `tf.function` that is called eagerly) optimizers, gradients
        with respect to variables, tables and monitored sessions are a RuntimeError, before
        anything has changed. Everything else works eagerly as outside: `tf.data`, arithmetic,
        gradients with respect to tensors, `tf.saved_model.load`, a Keras model that only predicts,
        summaries, Horovod's own functions. A variable that is made or assigned eagerly is this
        rank's own.

        Args:
            embedding_gradients: Says what becomes of the ranks' gradients of a table: their 'mean'
                (default) or their 'sum'. HybridBackend and SparseOperationKit take the sum: it is
                for settings that were tuned for them.
            missing_slots: Says what restoring a checkpoint does about an optimizer's slots and
                scalars that it lacks, because another optimizer wrote it: 'error' (default), or
                'fresh', which initializes them.
            grouping: Lets lookups share exchanges. Default True; with False each has its own. The
                numbers are the same.
            wire_dtype: Gives the type in which rows of float32 tables travel: tf.float16 or
                tf.bfloat16, to which they are rounded, or None (default), which is exact. It
                needs grouped lookups.
            gradient_wire_dtype: Gives the type in which the gradients of these rows travel, in the
                same way.
            plan: Lets rank 0 say on stderr what a slow start is busy with and, of several ranks,
                print the plan (see `plan()`) when the first training run of a graph starts. With
                'print', the default, a plan of many tables is summed up in 40 lines, with 'full' it
                lists everything; with 'quiet' rank 0 says nothing of either.
            profile: Names a folder for measurements of where the time of training steps goes (see
                `collective.profiling`). With None (default) nothing is measured. The folder is made
                on every rank when the first run is measured.
            profile_steps: Gives (first, last), the training runs of this process that are traced;
                the first is 1. Default (11, 20). After the last one rank 0 prints a split of the
                step and writes it as a page, report.html; every rank writes its trace.
            profile_every: Measures, in addition, every so many training runs, one each time, for
                TensorBoard's scalars and for the course of the job in the page: milliseconds a
                step, rows of dynamic tables. Default 0: none.
            local_steps: Gives k, the number of batches of which an update is made. Default 1. With
                k > 1 a run of the train_op adds its gradients to those of the runs before, and
                every k-th applies their mean: the update that one batch k times as large makes, by
                any optimizer of `tf.compat.v1.train`; what a script does to gradients (clipping) it
                does to the mean. `global_step` counts updates, so `max_steps`, learning-rate
                schedules and hooks by steps say the same as with the large batch. (TensorFlow's
                step counter may remark that it stands still in between.) Whatever else hangs on a
                run happens in each: batch normalisation sees one batch, moving averages are updated
                for each. Sums that haven't come to k are in no checkpoint, which holds the state
                after the last update: those of the last batches before the data end, or before a
                session is left, are dropped; saving changes nothing, restoring into the session
                restarts it. Optimizers that share gradients (clipped by one norm) are run together.
            dense_compression: Gives the type of 16 bits in which gradients of replicated variables
                travel, rounded once on each way and added in float32: 'fp16' or 'bf16'; 'none'
                (default) is exact. With 'fp16', a gradient beyond 65504 is infinite.
            prefetch_keys: Lets the keys of a batch be de-duplicated and exchanged while the batch
                before computes. Default False. Keys don't depend on weights: the numbers are the
                same. It is for models whose ids come from one tf.data iterator; the plan says
                whether it is on, or why not. An iterator is then a batch ahead of training, and a
                session that is left waits for that batch. It is off where an Estimator evaluates or
                predicts; other evaluations with the same iterator need equal numbers of batches on
                all ranks, or are an error on all.
            check: Gives k: after every k-th training run of a session the ranks compare checksums
                of the bits of all replicated variables. True stands for 100; default False. A
                difference is a `ReplicaError` on every rank, which names the variables. All of
                them are read, one after another. Left alone is what is each rank's own: local
                variables, those with `VariableSynchronization.ON_READ`.
            deterministic: Makes two launches of a program, on one machine and number of ranks, give
                the same bits. Default False. Inside it is
                `tf.config.experimental.enable_op_determinism`: kernels and tf.data have one order,
                whatever they are told, and an operation that has no such kernel is an error. Sums
                over three ranks or more are formed in the order of the ranks, by two exchanges in
                place of one. Give it before the graph is built. What draws random numbers (dropout,
                `shuffle`, one-shot iterators) needs a seed, or TensorFlow raises a RuntimeError:
                `tf.set_random_seed`, and `seed=… + strategy.rank()` where ranks shall draw their
                own. The first values of Keras's layers and of `tf.layers`, which TensorFlow leaves
                to Python's `random`, come from `tf.set_random_seed`, too, and need it. Left to the
                program are: numbers of NumPy (also those that functions of `tf.keras.backend` take
                for seeds) and of Python; threads and queues of its own;
                variables that a run reads and writes with nothing to order the two, as TensorFlow
                warns of sessions; what it reduces by Horovod itself, if HOROVOD_FUSION_THRESHOLD
                isn't 0.
            carrier: Names what carries the exchanges that are built inside: 'horovod', or
                'shared_memory', by which ranks on the CPUs of one host exchange without sockets,
                and without asking each other first; where that can't be it is Horovod, and the
                plan says why. 'nccl' moves them between the GPUs of one host without Horovod; where
                that can't be it is a RuntimeError that says why. 'auto' is shared memory where it
                can be. None (default) is what the environment variable COLLECTIVE_CARRIER says,
                'auto' without it, 'horovod' for everything; the ranks' agreement before a run
                always follows the variable. The numbers are the same, but for the last bits of
                dense gradients of three ranks or more, which shared memory adds in ranks' order.
            hierarchical: Lets the ranks of each host merge the keys, rows and gradients that they
                exchange with other hosts: True where it can be, 'auto' (default) where memory was
                8 times as fast as the network when the ranks started, or False. The plan says which
                it is, and why. The numbers are the same, but for the last bits of sums of
                gradients; with deterministic=True, of no other bits, only rows are merged.
            warm_start: Names checkpoints from which variables start: paths, or
                `collective.checkpoint.WarmStart(path, names={there: here}, slots=True)`, one or a
                list. Default None. It acts where a `MonitoredTrainingSession`, an Estimator or
                anything else that TensorFlow's SessionManager prepares starts without a checkpoint
                of its own; a checkpoint in its checkpoint_dir wins. Each variable starts from the
                first checkpoint of the list that has it: tables, static and dynamic, and ordinary
                variables, but not the global step. Optimizers' slots only with `slots=True`. Rank
                0 says on stderr what was taken, what started fresh, and what was left over.
            save_code: Saves the script, and the code and configurations below its folder, next to a
                job's first checkpoint, with versions, the command line and these options: see
                `collective.checkpoint.load_code`. Default False.
            checkpoint_blocking: Lets a save end when it is written (True, the default), or once the
                ranks have noted what belongs to it (False): it is then written during training, and
                holds exactly its step. The next save, the session's end and
                `collective.checkpoint.wait()` wait for it, and raise its error. What can't be
                followed is written at once: tables on a GPU or with rows in files, and all of them
                if the option came after the graph's first run.
            checkpoint_buffer: Bounds a rank's memory for such a save: bytes, or a share of its
                tables and slots (default 0.1), but at least 64 MB. It takes rows on their way to a
                file, and rows that training changes before they were read: where there is no room,
                training waits. Other variables and keys of dynamic tables are copied in addition.
            checkpoint_on_error: Says what becomes of training when the storage fails a save of a
                monitored session or Estimator (full, gone, read-only, out of reach): it goes on,
                with a warning ('continue', the default), or stops ('stop'), with a
                `collective.checkpoint.CheckpointStorageError` on all ranks. The next save tries
                again. A session's last save, and the script's own `Saver.save`, always raise it.

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Raises:
            TypeError: an option is unknown.
            ValueError: an option has a value that it can't have.
        """
        given = options.given(
            embedding_gradients=embedding_gradients,
            missing_slots=missing_slots,
            grouping=grouping,
            wire_dtype=wire_dtype,
            gradient_wire_dtype=gradient_wire_dtype,
            plan=plan,
            profile=profile,
            profile_steps=profile_steps,
            profile_every=profile_every,
            local_steps=local_steps,
            dense_compression=dense_compression,
            prefetch_keys=prefetch_keys,
            check=check,
            deterministic=deterministic,
            carrier=carrier,
            hierarchical=hierarchical,
            warm_start=warm_start,
            save_code=save_code,
            checkpoint_blocking=checkpoint_blocking,
            checkpoint_buffer=checkpoint_buffer,
            checkpoint_on_error=checkpoint_on_error,
        )
        # Checked here, where the script can see which call is wrong.
        ScopeOptions(**given)
        options.warn_of_idle(given, SCOPES.options.profile)
        return Scope(self, lambda: SCOPES.enter(given), SCOPES.leave)

    @options.takes_foreign(*options.names(EmbeddingOptions))
    def embedding_scope(
        self, *, min_rows: int = INHERIT, policy: TablePolicy | PolicyOption | None = INHERIT
    ) -> Scope[CollectiveStrategy]:
        """Makes tables of the variables that are made inside, sharded by rows over all ranks.

        A table is every 2-D floating-point variable that `tf.get_variable` makes. Row i lives on
        rank i mod N. A partitioner has no effect. The weights that a `tf.keras.layers.Embedding`
        makes when it is built inside are a table, too. Other variables (those of other Keras
        layers, `tf.Variable`) are made as outside: replicated. It can be nested; inside, options
        that are not given stay what they are outside.

        Args:
            min_rows: Variables of fewer rows are no tables. Default 0: all are. It is for the
                kernels of `tf.layers.dense` in a model that is built inside as a whole, say, and
                for tables that are too small to be worth an exchange.
            policy: Says what the tables keep that have no policy of their own: a
                `collective.TablePolicy`, DeepRec's `EmbeddingVariableOption` or PERSIA's
                `EmbeddingConfig`. A warning names the options that have no effect yet. Its
                initializer is for tables that are made without one. Default None: none.

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Raises:
            TypeError: an option is unknown, or `policy` is no policy.
            ValueError: min_rows isn't a whole number from 0.
            RuntimeError: it is entered outside scope(), or a variable is made eagerly inside.
        """
        if policy is not INHERIT:
            policy = policy_of(policy, "embedding_scope(): policy", stacklevel=4)
        given = options.given(min_rows=min_rows, policy=policy)
        EmbeddingOptions(**given)
        return Scope(self, lambda: SCOPES.enter_embedding(given), SCOPES.leave_embedding)

    def plan(self, graph: Any = None, fetches: Any = None, session: Any = None) -> Plan:
        """Describes as data what was built for a graph: tables, shards, groups, exchanges.

        No rank waits for another. `str(plan)` is what rank 0 prints when training starts: of many
        tables a summary, where `plan.to_text(full=True)` lists everything. `plan.to_dict()` and
        `plan.to_json()` are for programs.

        Args:
            graph: The graph; by default the current one.
            fetches: The fetches of the run whose exchanges are described. By default it is the
                first training run that there was in the graph; as long as there was none it is the
                whole graph.
            session: Counts the rows of dynamic tables on this rank; without a session they aren't
                known.

        Returns:
            The plan.

        Raises:
            Exception: whatever TensorFlow raises for fetches that aren't in the graph.
        """
        graph = graph or tf.get_default_graph()
        footprint = None
        if fetches is not None:
            leaves = graph_analysis.flatten(fetches)
            footprint = run_analysis.footprint_of(graph, leaves, [])
        return builder.build_plan(graph, footprint, session)

    def shard(self, dataset: tf2.data.Dataset) -> tf2.data.Dataset:
        """Returns this rank's part of a dataset that all ranks make alike.

        Element i goes to rank i mod N: every element is used by one rank, and by no other. In front
        of `batch()` elements are records; after it they are batches, which go to a rank whole. So
        does a file, where the dataset is one of file names, and a rank then reads its own files
        only; otherwise each rank reads all, and drops what is others'.

            dataset = tf.data.TFRecordDataset(files)
            dataset = strategy.shard(dataset).shuffle(10000).batch(512).repeat()

        With one rank it is the dataset itself. Training ends with the first rank that is out of
        data: where N doesn't divide the elements, some ranks have one more, of which the last is
        left over. Shuffling comes after it, or takes a seed that is the same on all ranks. What is
        told `deterministic=False` comes after it, too. An Estimator's input_fn doesn't need it:
        batches are dealt there (see `estimator`).

        Args:
            dataset: The dataset, of any elements; the same on every rank.

        Returns:
            The elements rank, rank + N, rank + 2N, ….

        Raises:
            TypeError: it is no `tf.data.Dataset`.
            ValueError: it is shuffled without a seed, or has an operation that is told
                `deterministic=False` (without `scope(deterministic=True)`), and so differs between
                the ranks.
        """
        return input_sharding.shard(dataset)

    @options.takes_foreign("shard_input", "keep_best", *options.OF_SAVES)
    def estimator(
        self,
        model_fn: Any,
        model_dir: Any = None,
        config: Any = None,
        params: Any = None,
        warm_start_from: Any = None,
        shard_input: bool = True,
        keep_best: KeepBest | tuple[str, str] | tuple[str, str, int] | None = None,
        save_code: bool = INHERIT,
        checkpoint_blocking: bool = INHERIT,
        checkpoint_buffer: int | float = INHERIT,
        checkpoint_on_error: CheckpointFailure = INHERIT,
    ) -> Estimator:
        """Makes a `tf.estimator.Estimator` that works on all ranks.

        It trains, evaluates, predicts and exports.

        Every rank makes it and calls its methods, in the same order, inside scope() or outside;
        the methods keep the options of the scope() that it is made in. An input_fn without an
        argument `input_context` returns a `tf.data.Dataset` of batches, the same on every rank:
        batch k goes to rank k mod N, and what it shuffles without a seed is shuffled alike. (Each
        rank reads all of it; an operation that is told `deterministic=False` would give each rank
        an order of its own, and is refused.) One with `input_context`
        (`tf.distribute.InputContext`) returns its rank's own share.

        Args:
            model_fn: Builds the model, as for `tf.estimator.Estimator`.
            model_dir: Names one folder that all ranks reach. Rank 0's counts for all, and a warning
                says so where another rank has another one or none. With None it is that of
                `config`, or else a temporary one, made by rank 0.
            config: Configures the runs (`tf.estimator.RunConfig`). Every rank is its own chief: a
                cluster in TF_CONFIG and device_filters have no effect. `collective.RunConfig` has
                more options: save_incremental_checkpoint_secs, save_incremental_checkpoint_steps.
            params: Is given to model_fn, as by `tf.estimator.Estimator`.
            warm_start_from: Gives first values, as for `tf.estimator.Estimator`.
            shard_input: Deals the batches to the ranks. Default True; with False every rank uses
                all that its input_fn gives.
            keep_best: Keeps the best checkpoints that evaluate() and train_and_evaluate() find, in
                `<model_dir>/best`: (metric, 'max' or 'min', how many), as in ('auc', 'max', 3), or
                a `collective.checkpoint.KeepBest`. Default None: none but the latest ones.
            save_code: See scope(), whose value is the default; so it is of the next three.
            checkpoint_blocking: See scope().
            checkpoint_buffer: See scope().
            checkpoint_on_error: See scope().

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Returns:
            The estimator.

        Raises:
            TypeError: an option is unknown.
            ValueError: `config` has a `tf.distribute` strategy, or another model_dir; or
                `keep_best` isn't of this form, or an option has a value that it can't have.
            RankError: rank 0 has no model_dir though another rank has one, or another rank's has a
                checkpoint and rank 0's has none.
        """
        # Imported at its first use: tf.estimator takes a while to load.
        from collective.estimator.estimator import Estimator

        values = (save_code, checkpoint_blocking, checkpoint_buffer, checkpoint_on_error)
        given = options.given(**dict(zip(options.OF_SAVES, values)))
        options.check_given("estimator", given)
        inherited = {**SCOPES.given, **given}
        return Estimator(
            lambda: Scope(self, lambda: SCOPES.enter(inherited), SCOPES.leave),
            shard_input,
            model_fn,
            model_dir,
            config,
            params,
            warm_start_from,
            None if keep_best is None else best.KeepBest.of(keep_best),
        )

    def export_saved_model(
        self,
        savedmodel_dir: str,
        checkpoint_dir: str | None = None,
        signature_def_fn: Callable[[], Any] | None = None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        clear_devices: bool = True,
        strip_default_attrs: bool = True,
        base: str | None = None,
    ) -> str:
        """Exports a checkpoint as a SavedModel that TensorFlow alone serves.

        Every rank calls it, inside scope() or outside, also while a session is open. No values pass
        through a session: each rank copies its part of the checkpoint. Tables become variables for
        TensorFlow's own lookups; a key that a dynamic table doesn't have yields zeros.

            def serving():
                ids = tf.placeholder(tf.int64, [None])
                return tf.saved_model.predict_signature_def({'ids': ids}, {'score': model(ids)})

            path = strategy.export_saved_model('export', 'checkpoints', serving)

        Args:
            savedmodel_dir: Names the folder in which the SavedModel is written, to
                `<savedmodel_dir>/<seconds since 1970>`; in a file system that all ranks have in
                common.
            checkpoint_dir: Names a folder, of which the latest checkpoint is exported, or a
                checkpoint by its prefix. With None it is the one that this process saved or
                restored last; without any, what the open session has, by a temporary one.
            signature_def_fn: Builds the graph to be served, with the variable names that were
                trained, and returns its `SignatureDef` (which becomes 'serving_default') or a dict
                of them. It is called on every rank, in a graph of its own.
            assets_extra: Maps paths within `assets.extra` to files; rank 0 copies them.
            as_text: Writes saved_model.pbtxt.
            clear_devices: Leaves out the devices of the operations.
            strip_default_attrs: Leaves out attributes that have their default, for older releases
                of TensorFlow.
            base: Names a version that was exported before, or a folder of versions, whose newest
                complete one it is then; in the same file system. Files that are the same are hard
                links to the base's, and the others are written: the new version is whole, and
                stays so when the base is deleted. Where there can be no links everything is
                written. With `savedmodel_dir` itself the first version has no base. How much was
                linked is in `saved_model.collective.json` of the new version, and rank 0 says so.

        Returns:
            The path of the SavedModel, on every rank. It appears when it is complete; after an
            error nothing is left of it.

        Raises:
            TypeError: signature_def_fn is no function, or returns something else.
            ValueError: there is no checkpoint, or no complete SavedModel at `base`, or one that has
                none of the variables; or the checkpoint lacks a variable of the graph or has it in
                another shape; or the graph has operations that TensorFlow alone can't run
                (`tf.py_function`).
            RankError: another rank failed, or the ranks' arguments or graphs differ.
        """
        # Imported at its first use: it loads what only an export needs.
        from collective.serving import export

        with self.scope():
            return export.from_session_script(
                savedmodel_dir,
                checkpoint_dir,
                signature_def_fn,
                assets_extra,
                as_text,
                clear_devices,
                strip_default_attrs,
                base,
            )
