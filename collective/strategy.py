"""Offers what a script calls: the strategy and its scopes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Callable, overload

import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2

from collective import strategies
from collective.checkpoint.saving import best
from collective.coordination import run_analysis
from collective.estimator import input_sharding
from collective.interception import scope_activation
from collective.ops.communication import collectives, membership
from collective.ops.graph import graph_analysis
from collective.options import EmbeddingOptions, ScopeOptions, declaration, scopes
from collective.options.declaration import INHERIT, names
from collective.options.methods import takes, takes_foreign
from collective.options.scopes import CheckpointFailure, TablePlacement
from collective.plan import builder, eager_plan
from collective.plan.forecast import placement_plan
from collective.plan.forecast.placement_plan import PlacementPlan
from collective.plan.plan import Plan
from collective.policy import PolicyOption, TablePolicy, policy_of
from collective.scope import SCOPES, Scope
from collective.tables import lookups as _lookups  # noqa: F401 (registers the lookup functions)

if TYPE_CHECKING:
    from collective.checkpoint.saving.best import KeepBest
    from collective.estimator.estimator import Estimator


class CollectiveStrategy:
    """Trains synchronously on all ranks of the job, with sharded embedding tables.

    It has the interface of DeepRec's `CollectiveStrategy`. The environment variable
    COLLECTIVE_STRATEGY names the backend, `hb` by default. A program that is started without the
    launcher has one rank.

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

    Training minimises the mean of the ranks' losses. With a mean loss over B / N samples on each of
    N ranks, it takes the same steps as plain TensorFlow in one process with B samples.

    Raises:
        ValueError: COLLECTIVE_STRATEGY names no backend, or COLLECTIVE_CARRIER no carrier.
        ImportError: Horovod is needed (several hosts, no shared memory), but isn't installed.
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

    @takes(ScopeOptions)
    def scope(self, given: dict[str, Any]) -> Scope[CollectiveStrategy]:
        """Opens the data-parallel part of a program: model, optimizer and sessions.

        Inside, gradients are combined over all ranks, sessions agree on every run, replicated
        variables start equal, and only rank 0 writes summaries and logs. Leaving the scope restores
        TensorFlow. A scope can be nested and entered again; an inner scope inherits the options
        that it doesn't set.

        The scope trains graphs, and eager code: `fit` of Keras models, loops with a
        `tf.GradientTape` and Keras's optimizers, in a `tf.function` or, more slowly, without one.
        In eager code (a forgotten `tf.Graph().as_default()`), optimizers of `tf.compat.v1.train`
        and monitored sessions raise a RuntimeError before anything changes. All other eager code
        works as outside: `tf.data`, arithmetic, gradients with respect to tensors,
        `tf.saved_model.load`, summaries, Horovod's own functions. Variables that a function of all
        ranks uses, or that a tape records, start with rank 0's values; any other that is made or
        assigned eagerly belongs to this rank alone.

        {options}

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Raises:
            TypeError: an option is unknown.
            ValueError: an option has an invalid value.
        """
        scopes.warn_of_idle(given, SCOPES.options.profile)
        return Scope(self, lambda: SCOPES.enter(given), SCOPES.leave)

    @takes_foreign(*names(EmbeddingOptions))
    def embedding_scope(
        self,
        *,
        min_rows: int = INHERIT,
        policy: TablePolicy | PolicyOption | None = INHERIT,
        placement: TablePlacement = INHERIT,
        replicate_below: int | str = INHERIT,
    ) -> Scope[CollectiveStrategy]:
        """Makes tables of the variables that are made inside, sharded by rows over all ranks.

        Every 2-D floating-point variable that `tf.get_variable` makes becomes a table. Row i lives
        on rank i mod N. A partitioner has no effect. The weights of a `tf.keras.layers.Embedding`
        that is built inside also become a table. Other variables (those of other Keras layers,
        `tf.Variable`) are replicated, as outside. A scope can be nested; an inner scope inherits
        the options that it doesn't set.

        Args:
            min_rows: Variables with fewer rows don't become tables. Default 0: all become tables.
                Use it for the kernels of `tf.layers.dense` if a whole model is built inside, and
                for tables that are too small to be worth an exchange.
            policy: Policy of the tables that have no policy of their own: a
                `collective.TablePolicy`, DeepRec's `EmbeddingVariableOption` or PERSIA's
                `EmbeddingConfig`. A warning names the options that have no effect yet. Its
                initializer is for tables that are made without one. Default None: no policy.
            placement: Where the rows of a table are. 'rows', the default: row i on rank i mod N, a
                dynamic table's where its key's hash says. 'whole': all on one rank, the one that
                has the fewest bytes of such tables so far (of dynamic tables: of their rows, one of
                each); 'whole:K': all on rank K mod N. 'replicated': all on every rank, as a
                variable outside of the scope has them, so that lookups need no exchange. 'auto': by
                rows or replicated, as the planner predicts the shorter step on this job's ranks,
                when the table is made; 'auto:FILE': by rows, replicated, or whole on a rank, by the
                ids in the file of tables of an earlier run, such as a profile's tables.yml. All
                ranks choose the same; plan() says what, and why (see docs/guides/placement.md).
                With each of them a table starts with the same values and its updates are the same,
                and a checkpoint that was saved with one can be restored with another. 'replicated'
                is an error for a dynamic table, whose number of rows isn't known, and for a policy
                with a weight_bound. The environment variable COLLECTIVE_PLACEMENT has another
                default.
            replicate_below: Replicates static tables whose weights take fewer bytes, all rows
                together and without slots; other tables follow `placement`. A number, or a text
                with a unit: '1 MB' is 1,000,000 bytes, '1 MiB' is 1,048,576. Tables with a
                weight_bound keep their placement. Default 0: none.

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Raises:
            TypeError: an option is unknown, or `policy` is no policy.
            ValueError: an option has an invalid value; or, when a table is made, it can't have the
                placement.
            RuntimeError: it is entered outside scope(), or a table is made inside a tf.function.
            RankError: when the first table of an 'auto' scope is made, another rank does something
                else.
        """
        if policy is not INHERIT:
            policy = policy_of(policy, "embedding_scope(): policy", stacklevel=4)
        given = declaration.given(
            min_rows=min_rows, policy=policy, placement=placement, replicate_below=replicate_below
        )
        EmbeddingOptions(**given)
        return Scope(self, lambda: SCOPES.enter_embedding(given), SCOPES.leave_embedding)

    @overload
    def plan(
        self,
        graph: Any = None,
        fetches: Any = None,
        session: Any = None,
        *,
        devices: None = None,
        hosts: None = None,
        batch: None = None,
    ) -> Plan: ...

    @overload
    def plan(
        self,
        graph: Any = None,
        fetches: None = None,
        session: Any = None,
        *,
        devices: str,
        hosts: int | None = None,
        batch: int | str | None = None,
    ) -> PlacementPlan: ...

    def plan(
        self,
        graph: Any = None,
        fetches: Any = None,
        session: Any = None,
        *,
        devices: str | None = None,
        hosts: int | None = None,
        batch: int | str | None = None,
    ) -> Plan | PlacementPlan:
        """Returns a description of what was built for a graph: tables, shards, groups, exchanges.

        No rank waits for another. `str(plan)` is what rank 0 prints when training starts: a summary
        if there are many tables. `plan.to_text(full=True)` lists everything. `plan.to_dict()` and
        `plan.to_json()` are for programs. After a profile it also has the time that the planner
        predicts for a step, next to the measured one.

        With `devices`, it returns the planner's answer instead: where the tables of this graph are
        best on these machines, of which there need be none, and how long a step would take (a
        `PlacementPlan`; see docs/guides/placement.md). What scope(profile=…) has measured is used,
        and the graph's shapes; everything else is assumed, and the plan says so.

            plan = strategy.plan(devices="64 x H100-80GB", batch=65536)
            print(plan)
            plan.save_tables("tables.yml")  # for `collective plan --tables`

        Args:
            graph: The graph, or a Keras model; by default the current graph, and in eager code all
                tables that it has made. Of a model that `fit` trains, exchanges are those of the
                function that trains its tables, once that is traced.
            fetches: The fetches of the run whose exchanges are described. By default the first
                training run of the graph, or the whole graph before any training run.
            session: Session in which to count the rows of dynamic tables on this rank; without it
                they aren't known.
            devices: How many devices, and which: '64 x H100-80GB'; or 'this job', its ranks and
                hosts. Default None: no plan for machines, but the description.
            hosts: Hosts of the devices. Default None: as many as 8 on each make.
            batch: Samples of a step of all these devices together, or a multiple of this job's:
                '2x'. Default None: as many as here.

        Returns:
            The plan.

        Raises:
            ValueError: a Keras model or eager code, and another argument; `devices` isn't of this
                form, or names an unknown device; the tables don't fit into the memory of these
                devices; the graph has no tables; or `hosts` or `batch` has an invalid value, or is
                given without `devices`, or `fetches` with it.
            Exception: whatever TensorFlow raises for fetches that aren't in the graph.
        """
        is_model = eager_plan.is_layer(graph)
        if is_model or graph is None and tf.executing_eagerly():
            if any(given is not None for given in (fetches, session, devices, hosts, batch)):
                raise ValueError(
                    "plan(fetches=…, session=…, devices=…, hosts=…, batch=…) is for a graph: Keras "
                    "models, and tables that eager code makes, have none."
                )
            return eager_plan.build(graph)
        graph = graph or tf.get_default_graph()
        if devices is not None:
            if fetches is not None:
                raise ValueError("plan(devices=…) plans all tables: leave fetches out.")
            return placement_plan.plan_for(graph, devices, hosts, batch, session)
        if hosts is not None or batch is not None:
            raise ValueError("plan(hosts=…, batch=…) needs devices='64 x H100-80GB', too.")
        footprint = None
        if fetches is not None:
            leaves = graph_analysis.flatten(fetches)
            footprint = run_analysis.footprint_of(graph, leaves, [])
        return placement_plan.with_prediction(builder.build_plan(graph, footprint, session), graph)

    def shard(self, dataset: tf2.data.Dataset) -> tf2.data.Dataset:
        """Returns this rank's part of a dataset that is the same on all ranks.

        Element i goes to rank i mod N, so exactly one rank uses each element. Before `batch()`,
        elements are records; after it, they are batches, which go to a rank whole. In a dataset of
        file names, the elements are files, and a rank reads only its own files; otherwise each rank
        reads all of the data and drops other ranks' elements.

            dataset = tf.data.TFRecordDataset(files)
            dataset = strategy.shard(dataset).shuffle(10000).batch(512).repeat()

        With one rank it returns the dataset itself. Training ends when the first rank runs out of
        data: if N doesn't divide the number of elements, some ranks have one more element, which
        isn't used. Shuffle after it, or with a seed that is the same on all ranks. Use operations
        with `deterministic=False` after it, too. An Estimator's input_fn doesn't need it: the
        Estimator deals the batches (see `estimator`).

        Args:
            dataset: The dataset, of any elements; the same on every rank.

        Returns:
            The elements rank, rank + N, rank + 2N, ….

        Raises:
            TypeError: it isn't a `tf.data.Dataset`.
            ValueError: it is shuffled without a seed, or has an operation with
                `deterministic=False` (without `scope(deterministic=True)`), and so differs between
                the ranks.
        """
        return input_sharding.shard(dataset)

    @takes_foreign("shard_input", "keep_best", *scopes.OF_SAVES)
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

        It can train, evaluate, predict and export.

        Create it on every rank, and call its methods in the same order on every rank, inside or
        outside scope(). The methods use the options of the scope() in which it is created. An
        input_fn without an argument `input_context` returns a `tf.data.Dataset` of batches, the
        same on every rank: batch k goes to rank k mod N, and shuffling without a seed gives the
        same order on all ranks. (Each rank reads all of it. An operation with `deterministic=False`
        would give each rank its own order, and is refused.) An input_fn with `input_context`
        (`tf.distribute.InputContext`) returns its rank's own share.

        Args:
            model_fn: Builds the model, as for `tf.estimator.Estimator`.
            model_dir: A folder that all ranks can reach. All ranks use rank 0's; a warning says so
                if another rank passes a different one or none. With None it is that of `config`, or
                a temporary folder that rank 0 makes.
            config: Configures the runs (`tf.estimator.RunConfig`). Every rank is its own chief: a
                cluster in TF_CONFIG and device_filters have no effect. `collective.RunConfig` has
                more options: save_incremental_checkpoint_secs, save_incremental_checkpoint_steps.
            params: Passed to model_fn, as by `tf.estimator.Estimator`.
            warm_start_from: Source of initial values, as for `tf.estimator.Estimator`.
            shard_input: Whether to deal the batches to the ranks. Default True; with False every
                rank uses everything that its input_fn returns.
            keep_best: Keeps the best checkpoints that evaluate() and train_and_evaluate() find, in
                `<model_dir>/best`: (metric, 'max' or 'min', how many), as in ('auc', 'max', 3), or
                a `collective.checkpoint.KeepBest`. Default None: only the latest ones are kept.
            save_code: See scope(), whose value is the default; likewise for the next three.
            checkpoint_blocking: See scope().
            checkpoint_buffer: See scope().
            checkpoint_on_error: See scope().

        Options that tune HybridBackend or SparseOperationKit have no effect: a warning names them.

        Returns:
            The estimator.

        Raises:
            TypeError: an option is unknown.
            ValueError: `config` has a `tf.distribute` strategy, or another model_dir; or
                `keep_best` isn't of this form, or an option has an invalid value.
            RankError: rank 0 has no model_dir but another rank has one, or another rank's has a
                checkpoint but rank 0's has none.
        """
        # Imported at its first use: tf.estimator takes a while to load.
        from collective.estimator.estimator import Estimator

        values = (save_code, checkpoint_blocking, checkpoint_buffer, checkpoint_on_error)
        given = declaration.given(**dict(zip(scopes.OF_SAVES, values)))
        scopes.check_given("estimator", given)
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
        model: Any = None,
    ) -> str:
        """Exports a checkpoint as a SavedModel that plain TensorFlow can serve.

        Call it on every rank, inside or outside scope(), also while a session is open. No values
        pass through a session: each rank copies its part of the checkpoint. Tables become variables
        for TensorFlow's own lookups; an unknown key of a dynamic table yields zeros.

            def serving():
                ids = tf.placeholder(tf.int64, [None])
                return tf.saved_model.predict_signature_def({'ids': ids}, {'score': model(ids)})

            path = strategy.export_saved_model('export', 'checkpoints', serving)

        Args:
            savedmodel_dir: Folder for the SavedModel, which is written to
                `<savedmodel_dir>/<seconds since 1970>`; on a file system that all ranks share.
            checkpoint_dir: A folder, whose latest checkpoint is exported, or a checkpoint's prefix.
                With None it is the checkpoint that this process saved or restored last; if there is
                none, the state of the open session, through a temporary checkpoint.
            signature_def_fn: Builds the graph to be served, with the same variable names as in
                training, and returns its `SignatureDef` (which becomes 'serving_default') or a dict
                of them. It is called on every rank, in a separate graph.
            assets_extra: Maps paths within `assets.extra` to files; rank 0 copies them.
            as_text: Whether to write saved_model.pbtxt.
            clear_devices: Whether to remove the devices of the operations.
            strip_default_attrs: Whether to remove attributes that have their default, for older
                releases of TensorFlow.
            base: A version that was exported before, or a folder of versions, whose newest complete
                version is used; on the same file system. Files with equal content become hard links
                to the base's, and the others are written. The new version is complete, and stays
                complete when the base is deleted. If links aren't possible, everything is written.
                With `savedmodel_dir` itself, the first version has no base.
                `saved_model.collective.json` of the new version says how much was linked, and rank
                0 prints it.
            model: A functional or sequential Keras model that was made eagerly, in the place of
                `signature_def_fn`. Its inputs and outputs have their own names in the signature.
                With checkpoint_dir=None its own weights are exported, through a temporary
                checkpoint.

        Returns:
            The path of the SavedModel, on every rank. It appears when it is complete; after an
            error nothing is left.

        Raises:
            TypeError: signature_def_fn isn't a function, or returns something else; model is no
                functional or sequential Keras model, or comes with signature_def_fn.
            ValueError: there is no checkpoint, or no complete SavedModel at `base`, or one that has
                none of the variables; or the checkpoint lacks a variable of the graph or has it in
                another shape; or the graph has operations that TensorFlow alone can't run
                (`tf.py_function`).
            RankError: another rank failed, or the ranks' arguments or graphs differ.
        """
        # Imported at its first use: it loads what only an export needs.
        from collective.serving import export

        with self.scope(), contextlib.ExitStack() as saving:
            if model is not None:
                from collective.serving import keras_model

                if signature_def_fn is not None:
                    raise TypeError("export_saved_model takes model or signature_def_fn, not both.")
                signature_def_fn = keras_model.signatures_of(model, self.embedding_scope)
                saving.callback(keras_model.keep_eager, model)
                if checkpoint_dir is None:
                    saved = keras_model.checkpoint_of(model, savedmodel_dir)
                    checkpoint_dir = saving.enter_context(saved)
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
