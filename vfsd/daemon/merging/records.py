"""States and lineages as messages between two daemons, and back."""

from __future__ import annotations

from vfsd.daemon.merging.lineage import Ancestor, Lineage, MergedState, StateId
from vfsd.wire.merge_messages import AncestorRecord, LineageResult, StateRecord


def state_record(state: StateId) -> StateRecord:
    """Return the record of `state`."""
    return StateRecord(state.name, state.serial, state.created_ns)


def state_id(record: StateRecord) -> StateId:
    """Return the state of a record."""
    return StateId(record.name, record.serial, record.created_ns)


def ancestor_record(ancestor: Ancestor) -> AncestorRecord:
    """Return the record of `ancestor`."""
    return AncestorRecord(ancestor.instance, ancestor.name, state_record(ancestor.left_at))


def lineage_result(found: Lineage) -> LineageResult:
    """Return the answer with the lineage `found`."""
    return LineageResult(
        found.instance,
        found.name,
        list(map(ancestor_record, found.ancestors)),
        [AncestorRecord(each.instance, each.name, state_record(each.state)) for each in found.merged],
        list(map(state_record, found.states)),
    )


def lineage_of(answer: LineageResult) -> Lineage:
    """Return the lineage in an answer."""
    return Lineage(
        answer.instance,
        answer.name,
        tuple(Ancestor(each.instance, each.name, state_id(each.state)) for each in answer.ancestors),
        tuple(MergedState(each.instance, each.name, state_id(each.state)) for each in answer.merged),
        tuple(map(state_id, answer.states)),
    )
