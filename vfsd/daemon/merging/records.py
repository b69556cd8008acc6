"""States and lineages as messages between two daemons, and back."""

from __future__ import annotations

from vfsd.daemon.merging.lineage import Ancestor, Lineage, MergedState, StateId
from vfsd.operations.merge import AncestorRecord, LineageResult, MergedRecord, StateRecord
from vfsd.wire.messages import from_wire_path, wire_path


def state_record(state: StateId) -> StateRecord:
    """Return the record of `state`."""
    return StateRecord(state.name, state.serial, state.created_ns)


def state_id(record: StateRecord) -> StateId:
    """Return the state of a record."""
    return StateId(record.name, record.serial, record.created_ns)


def ancestor_record(ancestor: Ancestor) -> AncestorRecord:
    """Return the record of `ancestor`."""
    return AncestorRecord(ancestor.instance, ancestor.name, state_record(ancestor.left_at))


def merged_record(merged: MergedState) -> MergedRecord:
    """Return the record of `merged`."""
    repositories = tuple(map(wire_path, merged.repositories))
    return MergedRecord(merged.instance, merged.name, state_record(merged.state), repositories)


def merged_state(record: MergedRecord) -> MergedState:
    """Return the merged state of a record."""
    repositories = tuple(map(from_wire_path, record.repositories))
    return MergedState(record.instance, record.name, state_id(record.state), repositories)


def lineage_result(found: Lineage) -> LineageResult:
    """Return the answer with the lineage `found`."""
    return LineageResult(
        found.instance,
        found.name,
        list(map(ancestor_record, found.ancestors)),
        list(map(merged_record, found.merged)),
        list(map(state_record, found.states)),
    )


def lineage_of(answer: LineageResult) -> Lineage:
    """Return the lineage in an answer."""
    return Lineage(
        answer.instance,
        answer.name,
        tuple(Ancestor(each.instance, each.name, state_id(each.state)) for each in answer.ancestors),
        tuple(map(merged_state, answer.merged)),
        tuple(map(state_id, answer.states)),
    )
