"""Exchanges between hosts in two levels: a host's ranks merge what they want before it leaves.

Of a job with L ranks on each host, rank l of a host is its *proxy* to the ranks l of all hosts.

    asker                     its proxies                     owners
    1. request: by the owner's
       number on its host
    2. messages ── memory ──► 3. one message an owner
                              4. message   ── network ──►     find rows
                              5. rows      ◄── network ──
    6. rows     ◄── memory ── one copy for each asker

So a key that several ranks of a host want leaves the host once, and its row comes once. A pair of
hosts exchanges L messages, not L · L. The gradient runs the same way back: a proxy adds what its
host's ranks send for a key before it travels.

Deterministic gradients are added in the order of all ranks, so they come to the owners one by one,
and with them every rank's keys. Only rows are merged then (`RowsInTwoLevels`):

    asker                     its proxies                     owners
    1. request
    2. messages ── memory ──► 3. what each owner sends
       messages ───────────── flat ─────────────────────────► find rows; one row for each key of
                                                              a host
    5. …                      rows      ◄── network ──
    6. rows     ◄── memory ── one copy for each asker
       gradients ──────────── flat ─────────────────────────► add
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops.communication import collective_names, collectives, gate, membership
from collective.ops.communication.hierarchy import Hosts
from collective.ops.exchange import embedding_bag, key_exchange, request_merging
from collective.ops.graph import graph_state


@dataclasses.dataclass
class FlatGradients:
    """Records what sends gradients of rows to the rows' owners.

    Attributes:
        by_rows: functions of a gradient, by the operation through which its rows came.
    """

    by_rows: dict[tf.Operation, Callable[[tf.Tensor], tf.Tensor]] = dataclasses.field(
        default_factory=dict
    )


class TwoLevelExchange:
    """Carries one group's keys to their owners, and rows back.

    Args:
        hosts: the job's.
        sections, kinds, counted: of the group's messages.
        zero: the gate's zero.
        wire: the types in which rows and gradients travel between hosts.
    """

    def __init__(
        self,
        hosts: Hosts,
        sections: Sequence[embedding_bag.Section],
        kinds: Sequence[int],
        counted: Sequence[bool],
        zero: Any,
        wire: key_exchange.Wire,
    ):
        self._hosts, self._sections, self._kinds = hosts, sections, kinds
        self._counted, self._zero, self._wire = counted, zero, wire

    def keys_to_owners(
        self, request: embedding_bag.Request, name: str
    ) -> key_exchange.ReceivedKeys:
        """Sends every key to its owner, by way of this host's proxies."""
        self._announce(request, name)
        self._merge_as_proxy(request, name)
        # 4
        return key_exchange.ReceivedKeys(
            *collectives.alltoall_between_hosts(
                self._merged.message, self._by_owner(self._merged.splits), name, self._zero
            )
        )

    def rows_back(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the rows that this rank requested; see `key_exchange.rows_back`."""
        # 5
        travelled = key_exchange.rows_back(
            rows, splits, name, self._zero, self._wire, collectives.alltoall_between_hosts
        )
        # 6
        spread = request_merging.spread(travelled, self._merged, self._sections, self._hosts.number)
        return collectives.alltoall_within_host(
            spread, self._merged.row_splits, name, self._zero, "rows"
        )[0]

    @property
    def merging(self) -> list[tf.Operation]:
        """Returns the operations other than the exchange of keys that need only keys."""
        return [self._merged.message.op]

    def _announce(self, request: embedding_bag.Request, name: str) -> None:
        """Tells what a rank that asks for nothing sends."""
        gates = gate.gates_of(tf.get_default_graph())
        gates.key_requests[name] = gate.KeyRequest(
            request.message, request.splits, 2 * len(self._sections)
        )

    def _merge_as_proxy(self, request: embedding_bag.Request, name: str) -> None:
        """Brings the requests of this host's ranks to their proxies, which merge them."""
        # 2
        messages, _ = collectives.alltoall_within_host(
            request.message, self._by_proxy(request.splits), name, self._zero
        )
        # 3
        self._merged = request_merging.merge(
            messages,
            self._sections,
            self._kinds,
            self._hosts.ranks,
            self._hosts.number,
            self._counted,
        )

    def _by_proxy(self, splits: tf.Tensor) -> tf.Tensor:
        """Sums `splits` [N], by the owners' numbers on their hosts, then by host: [L]."""
        return tf.reduce_sum(tf.reshape(splits, [self._hosts.ranks, self._hosts.number]), 1)

    def _by_owner(self, splits: tf.Tensor) -> tf.Tensor:
        """Returns `splits` [H] for the owners, with 0 for all other ranks: [N]."""
        hosts, number = self._hosts, membership.local_rank()
        padded = tf.pad(splits[:, None], [[0, 0], [number, hosts.ranks - 1 - number]])
        return tf.reshape(padded, [hosts.number * hosts.ranks])


class RowsInTwoLevels(TwoLevelExchange):
    """Carries one group's keys and gradients as a flat exchange does, and rows in two levels."""

    def keys_to_owners(
        self, request: embedding_bag.Request, name: str
    ) -> key_exchange.ReceivedKeys:
        """Sends every key to its owner, and to the proxy that gets its row."""
        self._announce(request, name)
        self._merge_as_proxy(request, collective_names.near(name))
        received = key_exchange.ReceivedKeys(
            *collectives.alltoall(*self._by_rank(request.message, request.splits), name, self._zero)
        )
        self._merged_by_host = request_merging.merge(
            received.keys,
            self._sections,
            self._kinds,
            self._hosts.ranks,
            self._hosts.number,
            self._counted,
            by_owner=True,
        )
        self._row_splits = request_merging.row_splits(
            request.message, request.splits, self._sections
        )
        return received

    def rows_back(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the rows that this rank requested; see `key_exchange.rows_back`."""
        first, to_hosts = request_merging.first(
            rows, self._merged_by_host, self._sections, self._hosts.number
        )
        merged = super().rows_back(first, self._by_owner(to_hosts), name)
        graph = tf.get_default_graph()
        with graph.gradient_override_map({"IdentityN": "CollectiveFlatGradient"}):
            received, _ = tf.identity_n([merged, rows])
        graph_state.of(graph, FlatGradients).by_rows[received.op] = lambda x: self._to_owners(
            x, rows, name
        )
        return received

    @property
    def merging(self) -> list[tf.Operation]:
        """Returns the operations other than the exchange of keys that need only keys."""
        return [*super().merging, self._merged_by_host.message.op, self._row_splits.op]

    def _to_owners(self, gradient: tf.Tensor, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Returns what all ranks send to this one as the gradients of the rows that it sent."""
        # Peers may update their rows as soon as they have every rank's gradients.
        with tf.control_dependencies([rows]):
            gradient = tf.identity(gradient)
        base = f"{name[len(collective_names.PREFIX) :]}.gradient"
        return key_exchange.gradients_to_owners(
            *self._by_rank(gradient, self._row_splits),
            collectives.unique_name(base),
            self._zero,
            self._wire,
        )

    def _by_rank(self, x: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Orders `x` and `splits` [N], by the ranks' numbers on their hosts, by rank instead."""
        numbers, hosts = self._hosts.ranks, self._hosts.number
        pieces = tf.split(x, splits, num=numbers * hosts)
        ordered = [
            pieces[number * hosts + host] for host in range(hosts) for number in range(numbers)
        ]
        by_host = tf.transpose(tf.reshape(splits, [numbers, hosts]))
        return tf.concat(ordered, 0), tf.reshape(by_host, [-1])


@tf.RegisterGradient("CollectiveFlatGradient")
def _flat_gradient(op: tf.Operation, gradient: Any, _: Any) -> list[Any]:
    to_owners = graph_state.of(op.graph, FlatGradients).by_rows[op]
    return [None, to_owners(tf.convert_to_tensor(gradient))]
