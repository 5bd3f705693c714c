"""Which run has a server, on a virtual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.engines.vllm_server_lease import LEASE_S, NotHeldError, ServerLease


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> ServerLease:
    return ServerLease(clock)


def test_a_free_server_is_given_and_another_run_is_told_who_has_it(lease: ServerLease, clock: Clock):
    assert lease.holder == ""
    assert lease.claim("a", "run A").granted
    clock.now_s += 3
    claim = lease.claim("b", "run B")
    assert (claim.granted, claim.holder, claim.silent_s) == (False, "run A", 3.0)
    assert lease.claim("a", "run A").granted  # again, as after a broken connection
    assert lease.holder == "run A"


def test_a_living_run_keeps_it_and_shows_that_it_lives(lease: ServerLease, clock: Clock):
    lease.claim("a", "run A")
    first = lease.claim("b", "run B")
    for _ in range(100):
        clock.now_s += LEASE_S - 0.1
        assert lease.renew("a")
        assert not lease.renew("b")
    claim = lease.claim("b", "run B")
    assert not claim.granted
    assert claim.renewals == first.renewals + 100


def test_a_run_that_gives_no_sign_of_life_loses_it_to_the_next_but_to_nobody_else(lease: ServerLease, clock: Clock):
    lease.claim("a", "run A")
    clock.now_s += LEASE_S - 0.1
    assert not lease.claim("b", "run B").granted
    clock.now_s += 1000.0
    assert lease.renew("a")  # it was stopped in a debugger, and nobody came
    clock.now_s += LEASE_S
    assert lease.claim("b", "run B").granted
    assert not lease.renew("a")
    with pytest.raises(NotHeldError, match=r"another run \(run B\)"), lease.call("a"):
        pass


def test_a_released_server_is_free_at_once(lease: ServerLease):
    lease.claim("a", "run A")
    lease.release("b")
    assert lease.holder == "run A"
    lease.release("a")
    assert lease.holder == ""
    assert not lease.renew("a")
    with pytest.raises(NotHeldError, match="no run has claimed it"), lease.call("a"):
        pass
    assert lease.claim("b", "run B").granted
    lease.release("a")
    assert lease.holder == "run B"


@pytest.mark.parametrize("released", [False, True])
def test_what_a_dead_run_left_in_the_server_ends_before_the_next_one_gets_it(
    lease: ServerLease, clock: Clock, released: bool
):
    lease.claim("a", "run A")
    with lease.call("a"):
        if released:
            lease.release("a")
        clock.now_s += 10 * LEASE_S
        assert not lease.claim("b", "run B").granted
    assert lease.claim("b", "run B").granted


def test_calls_are_signs_of_life_but_do_not_show_that_the_run_lives(lease: ServerLease, clock: Clock):
    lease.claim("a", "run A")
    before = lease.claim("b", "run B").renewals
    clock.now_s += LEASE_S - 1
    with lease.call("a"):
        pass
    clock.now_s += LEASE_S - 1
    claim = lease.claim("b", "run B")
    assert (claim.granted, claim.renewals) == (False, before)


def test_a_claim_needs_an_id(lease: ServerLease):
    with pytest.raises(ValueError, match="X-Async-RL-Run"):
        lease.claim("", "nobody")


EVENTS = st.tuples(st.sampled_from("abc"), st.sampled_from(["claim", "renew", "release", "call"]), st.floats(0, 30))


@given(st.lists(EVENTS, max_size=60))
def test_at_most_one_run_has_it_and_none_loses_it_while_it_lives(events):
    clock = Clock()
    lease = ServerLease(clock)
    has, seen_s = "", 0.0
    for run, what, pause_s in events:
        clock.now_s += pause_s
        if what == "claim":
            granted = lease.claim(run, run).granted
            assert granted == (has in ("", run) or clock.now_s - seen_s >= LEASE_S)
            if granted:
                has, seen_s = run, clock.now_s
        elif what == "release":
            lease.release(run)
            has = "" if run == has else has
        else:
            if what == "renew":
                held = lease.renew(run)
            else:
                try:
                    with lease.call(run):
                        held = True
                except NotHeldError:
                    held = False
            assert held == (run == has)
            seen_s = clock.now_s if held else seen_s
        assert lease.holder == has
