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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from collective.ops import collectives, embedding_bag, exchange, gate, request_merging
from collective.ops.hierarchy import Hosts


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
        wire: exchange.Wire,
    ):
        self._hosts, self._sections, self._kinds = hosts, sections, kinds
        self._counted, self._zero, self._wire = counted, zero, wire

    def keys_to_owners(self, request: embedding_bag.Request, name: str) -> exchange.ReceivedKeys:
        """Sends every key to its owner, by way of this host's proxies."""
        self._request, hosts = request, self._hosts
        gates = gate.gates_of(tf.get_default_graph())
        gates.key_requests[name] = gate.KeyRequest(
            request.message, request.splits, 2 * len(self._sections)
        )
        # 2
        messages, _ = collectives.alltoall_within_host(
            request.message, self._by_proxy(request.splits), name, self._zero
        )
        # 3
        self._merged = request_merging.merge(
            messages, self._sections, self._kinds, hosts.ranks, hosts.number, self._counted
        )
        # 4
        return exchange.ReceivedKeys(
            *collectives.alltoall_between_hosts(
                self._merged.message, self._by_owner(self._merged.splits), name, self._zero
            )
        )

    def rows_back(self, rows: tf.Tensor, splits: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the rows that this rank requested; see `exchange.rows_back`."""
        # 5
        travelled = exchange.rows_back(
            rows, splits, name, self._zero, self._wire, collectives.alltoall_between_hosts
        )
        # 6
        spread = request_merging.spread(travelled, self._merged, self._sections, self._hosts.number)
        return collectives.alltoall_within_host(
            spread, self._merged.row_splits, name, self._zero, "rows"
        )[0]

    @property
    def merging(self) -> tf.Operation:
        """Returns the operation that merges the requests."""
        return self._merged.message.op

    def _by_proxy(self, splits: tf.Tensor) -> tf.Tensor:
        """Sums `splits` [N], by the owners' numbers on their hosts, then by host: [L]."""
        return tf.reduce_sum(tf.reshape(splits, [self._hosts.ranks, self._hosts.number]), 1)

    def _by_owner(self, splits: tf.Tensor) -> tf.Tensor:
        """Returns `splits` [H] for the owners, with 0 for all other ranks: [N]."""
        hosts, number = self._hosts, collectives.local_rank()
        padded = tf.pad(splits[:, None], [[0, 0], [number, hosts.ranks - 1 - number]])
        return tf.reshape(padded, [hosts.number * hosts.ranks])
