"""The restart policy for simulated deaths."""

from __future__ import annotations

import signal

import pytest

from mqproc.supervisor.hooks import Death, Deaths, Halt, Restart, RestartPolicy

SECOND = 1_000_000_000
KILLED = Death(-1, signal.SIGKILL, lived_ms=50.0)


def decide(deaths: Deaths, death: Death, *seconds: float) -> list[Restart | Halt]:
    return [deaths.decide(death, int(at * SECOND)) for at in seconds]


def test_restart_first_is_immediate_then_backs_off() -> None:
    deaths = Deaths("writer", RestartPolicy(deaths_max=8))
    delays = [made.delay_ms for made in decide(deaths, KILLED, *range(7)) if isinstance(made, Restart)]
    assert delays == [0, 100, 200, 400, 800, 1600, 3200]


def test_restart_back_off_is_capped() -> None:
    deaths = Deaths("writer", RestartPolicy(window_ms=1))
    assert decide(deaths, KILLED, *range(30))[-1] == Restart(5000)


def test_restart_back_off_resets_after_long_life() -> None:
    deaths = Deaths("writer", RestartPolicy())
    old = Death(-1, signal.SIGKILL, lived_ms=11_000.0)
    assert decide(deaths, KILLED, 0, 1) == [Restart(0), Restart(100)]
    assert decide(deaths, old, 12) == [Restart(0)]
    assert decide(deaths, KILLED, 13) == [Restart(0)]


def test_restart_fifth_death_in_a_minute_halts() -> None:
    deaths = Deaths("writer", RestartPolicy())
    last = decide(deaths, KILLED, 0, 15, 30, 45, 60)[-1]
    assert last == Halt(1, "writer died 5 times within 60 s, last by SIGKILL (perhaps out of memory)")


def test_restart_five_deaths_in_longer_time_do_not_halt() -> None:
    deaths = Deaths("writer", RestartPolicy())
    assert all(isinstance(made, Restart) for made in decide(deaths, KILLED, *range(0, 400, 16)))


def test_restart_fifth_death_of_role_never_running_halts() -> None:
    deaths = Deaths("writer", RestartPolicy())
    hung = Death(-1, signal.SIGABRT, lived_ms=122_000.0)
    made = [deaths.decide(hung, at * 122 * SECOND, has_run=False) for at in range(1, 6)]
    assert made[:4] == [Restart(0)] * 4
    assert made[4] == Halt(1, "writer died 5 times before it ran, last by SIGABRT")


@pytest.mark.parametrize("code", [2, 3, 6, 7, 8])
def test_restart_final_exit_codes_halt(code: int) -> None:
    made = Deaths("query", RestartPolicy()).decide(Death(code), 0)
    assert made == Halt(code, f"query ended with exit code {code}, which a restart does not fix")


@pytest.mark.parametrize("code", [0, 1, 4, 130])
def test_restart_other_exit_codes_are_restarted(code: int) -> None:
    assert Deaths("query", RestartPolicy()).decide(Death(code), 0) == Restart(0)


def test_restart_death_has_its_cause() -> None:
    assert str(Death(3)) == "exit code 3"
    assert str(Death(-1, signal.SIGBUS)) == "SIGBUS (an inaccessible mapped page)"
    assert str(Death(-1, signal.SIGSEGV)) == "SIGSEGV"
    assert str(Death(-1, 63)) == "signal 63"
