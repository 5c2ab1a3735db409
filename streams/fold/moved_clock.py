"""The clocks of partitions, moved to topics with more partitions. Pure."""

from streams.fold.clock import clock_key, decode_clock, encode_clock
from streams.runtime.moving import Move, State, States


def moved_clock(states: States, move: Move, target: int, begin: int) -> State:
    """Returns the clock entry of the new partition `target`, whose first record to read is at `begin`; empty if no old
    partition that its keys come from has a clock. Raises DamagedState."""
    times = {
        partition: decode_clock(value)[1]
        for partition, state in states.items()
        if (value := state.get(clock_key(partition))) is not None
    }
    time = move.clock(times, target)
    return {} if time is None else {clock_key(target): encode_clock(begin - 1, time)}
