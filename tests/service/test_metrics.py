"""The metrics of the service."""

from __future__ import annotations

from gpushare_spawner.service.actions.context import Counters
from gpushare_spawner.service.culler.decisions import CullerSettings, decide_sessions
from gpushare_spawner.service.history.store import Wait, WaitOutcome
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.service.sources import ServiceSnapshot
from gpushare_spawner.service.web.metrics import exposition
from tests.monitoring.states import trouble
from tests.service.dashboards import NO_AGENT, NOW, TEMPLATES, afternoon

State = tuple[ServiceSnapshot, Counters] | tuple[ServiceSnapshot, Counters, str]


def lines(state: State) -> list[str]:
    return exposition(*state).decode().splitlines()


def samples(state: State, name: str) -> list[str]:
    """The samples of a metric, without its name."""
    return [line.removeprefix(name) for line in lines(state) if line.partition("{")[0].partition(" ")[0] == name]


def test_metrics_of_agents_gpus_sessions_and_culler() -> None:
    snapshots = [NodeSnapshot(NO_AGENT, afternoon()), NodeSnapshot(NO_AGENT, None, "silent")]
    decisions = decide_sessions(snapshots, (), TEMPLATES, NOW, CullerSettings())
    counters = Counters()
    counters.failures["hub"] += 1
    counters.last_round = NOW
    shown = lines((ServiceSnapshot(NOW, snapshots, decisions), counters))
    model = 'model="Simulated GPU 16 GiB",node="workstation",uuid="GPU-0"'
    ann = 'server="",template="quarter",user="ann"'
    for expected in [
        'gpushare_agents{available="no"} 1.0',
        f'gpushare_gpu_units{{gpu="0",kind="lent",{model}}} 40.0',
        f'gpushare_gpu_waiting_sessions{{gpu="0",{model}}} 1.0',
        'gpushare_sessions{node="workstation",template="quarter",tier="active"} 2.0',
        'gpushare_session_gpu_idle_seconds{node="workstation",server="thesis",template="quarter",user="bob"} 2460.0',
        f'gpushare_session_entitled_seconds_total{{node="workstation",{ann}}} 1500.0',
        f'gpushare_session_delivered_seconds_total{{node="workstation",{ann}}} 1482.0',
        f'gpushare_session_lease_wait_seconds{{node="workstation",quantile="0.95",{ann}}} 0.194',
        f'gpushare_session_lease_wait_seconds_count{{node="workstation",{ann}}} 12.0',
        f'gpushare_session_memory_limit_hits_total{{node="workstation",{ann}}} 3.0',
        'gpushare_culler_actions_total{tier="downgraded"} 0.0',
        'gpushare_culler_failures_total{component="hub"} 1.0',
        "gpushare_culler_last_round_timestamp_seconds 1e+06",
    ]:
        assert expected in shown, expected


def test_utilisation_of_a_gpu_is_left_out_where_the_driver_does_not_say() -> None:
    assert samples(trouble(), "gpushare_gpu_utilization_ratio") == [
        '{gpu="0",model="Simulated GPU 16 GiB",node="workstation",uuid="GPU-0"} 0.97'
    ]


def test_heat_and_power_of_a_gpu_are_left_out_where_the_driver_does_not_say() -> None:
    gpu = '{gpu="0",model="Simulated GPU 16 GiB",node="workstation",uuid="GPU-0"}'
    assert samples(trouble(), "gpushare_gpu_temperature_celsius") == [f"{gpu} 91.0"]
    assert samples(trouble(), "gpushare_gpu_power_watts") == [f"{gpu} 233.5"]


def test_queue_has_its_length_and_its_oldest_spawn_by_template_zero_included() -> None:
    assert samples(trouble(), "gpushare_queue_spawns") == [
        '{template="quarter"} 12.0', '{template="half"} 0.0', '{template="tenth"} 0.0',
    ]  # fmt: skip
    assert samples(trouble(), "gpushare_queue_oldest_seconds")[0] == '{template="quarter"} 3600.0'


def test_queue_that_is_unknown_has_no_samples() -> None:
    assert samples((ServiceSnapshot(NOW, templates=TEMPLATES), Counters()), "gpushare_queue_spawns") == []


def test_waits_of_spawns_are_a_histogram_by_template_and_those_that_gave_up_are_counted_apart() -> None:
    counted = Counters()
    for seconds in (0.4, 1.0, 7.0, 5000.0):
        counted.waited(Wait(NOW, seconds, WaitOutcome.STARTED, "ann", template="quarter"))
    counted.waited(Wait(NOW, 60.0, WaitOutcome.GAVE_UP, "bob", template="half"))
    state = (ServiceSnapshot(NOW), counted)
    assert samples(state, "gpushare_spawn_wait_seconds_bucket") == [
        f'{{le="{bound}",template="quarter"}} {number}.0'
        for bound, number in (
            (1, 2), (2, 2), (5, 2), (10, 3), (30, 3), (60, 3), (120, 3), (300, 3), (600, 3), (1800, 3), (3600, 3),
            ("+Inf", 4),
        )
    ]  # fmt: skip
    assert samples(state, "gpushare_spawn_wait_seconds_sum") == ['{template="quarter"} 5008.4']
    assert samples(state, "gpushare_spawns_given_up_total") == ['{template="half"} 1.0']


def test_quotas_show_what_is_guaranteed_used_and_over_quota_of_each_account() -> None:
    def of(name: str) -> dict[str, str]:
        shown = (sample.partition("} ") for sample in samples(trouble(), f"gpushare_quota_{name}_units"))
        return {labels.partition('account="')[2].partition('"')[0]: value for labels, _, value in shown}

    assert of("guaranteed")["optics"] == "50.0"
    assert of("used")["optics"] == "75.0"
    assert of("over")["optics"] == "75.0"  # the session does not fit into the guarantee whole
    assert of("maximum") == {"optics": "200.0"}
    # without sessions, and in a department
    assert of("used")["lasers"] == "0.0"
    assert 'department="physics"' in "".join(samples(trouble(), "gpushare_quota_used_units"))
    # users without a quota of their own
    assert of("over")["ann"] == "25.0"


def test_a_history_that_fails_is_a_metric_and_none_is_no_sample() -> None:
    assert samples(trouble(), "gpushare_history_failing") == [" 1.0"]
    assert samples((ServiceSnapshot(NOW), Counters(), ""), "gpushare_history_failing") == [" 0.0"]
    assert samples((ServiceSnapshot(NOW), Counters()), "gpushare_history_failing") == []
