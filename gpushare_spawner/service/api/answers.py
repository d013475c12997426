"""The models of the API's answers.

Units are 1 % of a GPU. Memory is in bytes, durations are in seconds, and instants in seconds since the epoch.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, RootModel

from gpushare_spawner.model.controls import Exemption, Keep, Message
from gpushare_spawner.model.layers import LayerName, MemoryEngine
from gpushare_spawner.model.quota import BudgetState, Quota, Resource, ResourceAmounts
from gpushare_spawner.model.report import BypassingProcess, DeliveredReport, HostMemoryReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.quota.accounts import AccountKind
from gpushare_spawner.service.reports import UnconfirmedSession
from gpushare_spawner.service.units import Kind
from gpushare_spawner.wording.service import budget_left


class ApiModel(BaseModel):
    """A part of an answer."""

    model_config = ConfigDict(frozen=True, from_attributes=True, use_attribute_docstrings=True)


class Refusal(ApiModel):
    """The reason for the refusal of a request."""

    status: int
    message: str
    """A sentence for people."""
    code: str
    """A code for programs, like `unknown` or `forbidden`."""


class Done(ApiModel):
    """The result of an action."""

    changed: bool
    """False: the requested state was already in force."""
    message: str
    """A sentence for people."""


class CallerRights(ApiModel):
    """The caller's rights beyond reading their own sessions."""

    read_all: bool
    act_own: bool
    act_all: bool
    drain: bool


class ViewerAnswer(ApiModel):
    """The caller."""

    name: str
    """The user's name; empty: a program that is not a user."""
    admin: bool
    scopes: tuple[str, ...]
    """The caller's scopes for this service."""
    may: CallerRights


class Units(ApiModel):
    """Units of one or more GPUs. They add up to the capacity, or to the allocated units if those exceed it."""

    owned: int
    """Units guaranteed to their owners."""
    borrowed: int
    """Units lent by idle sessions and used by other sessions."""
    lent: int
    """Units lent by idle sessions and not used."""
    free: int
    """Units that are not allocated."""


class Summary(ApiModel):
    """Totals over all nodes with an available agent."""

    version: int
    """Version number that increases with each change; see `events`."""
    at: float
    nodes: int
    gpus: int
    unhealthy_gpus: int
    capacity_units: int
    units: Units
    available_units: int
    """Lent and free units of GPUs that accept new sessions: healthy and not cordoned."""
    sessions: dict[Tier, int]
    """The number of sessions in each tier, of all users."""
    own_sessions: int
    working: int
    """Number of sessions with GPU work that runs or waits now."""
    waiting: int
    """Number of sessions with GPU work that waits for a lease."""
    memory_bytes: int
    """Memory of all GPUs."""
    memory_used_bytes: int
    allocated_bytes: int
    """Device memory that sessions have allocated."""
    resident_bytes: int
    """The part of the allocated memory that is on the GPUs."""
    host_memory_budget_bytes: int | None
    """Host memory for paged-out GPU memory; null: no node has a budget."""
    host_memory_needed_bytes: int | None
    paged_out_bytes: int | None
    queue: int | None
    """Number of waiting spawns; null: the hub does not report them."""
    problems: tuple[str, ...]
    """Sentences about data that cannot be shown, with reasons."""
    complete: bool
    """Whether all agents answered."""


class SegmentEntry(ApiModel):
    """A part of a GPU's bar of units."""

    kind: Kind
    units: int
    user: str | None
    """The session's user; null: the units are free, or the caller may not see the session."""
    server: str | None
    over_limit: bool
    """Whether the session has more GPU memory than its limit; false if the caller may not see the session."""
    own: bool


class CordonEntry(ApiModel):
    """A cordon or drain of a GPU or node."""

    by: str
    """The admin's name."""
    reason: str
    since: float
    drain: bool
    """Whether the users of the sessions there were asked to leave."""
    stop_at: float | None
    """The time at which the servers of the remaining sessions are stopped; null: never."""


class GpuEntry(ApiModel):
    """One GPU."""

    index: int
    uuid: str
    model: str
    simulated: bool
    healthy: bool
    utilisation: float | None
    """Utilization from 0 to 1; null: the driver does not report it."""
    temperature_celsius: float | None
    power_watts: float | None
    memory_bytes: int
    memory_used_bytes: int
    paged_out_bytes: int
    """Paged-out memory of its sessions, as estimated by the agent."""
    context_bytes: int
    """GPU memory of its sessions' CUDA contexts."""
    layers: tuple[str, ...]
    """Titles of other sharing layers that share this GPU."""
    trouble: tuple[str, ...]
    """These layers' problems, as sentences."""
    capacity_units: int
    units: Units
    sessions: int
    working: int
    waiting: int
    suspended: int
    """Number of sessions that have all their memory and CUDA contexts in host memory."""
    cordoned: bool
    """Whether a cordon of this GPU or its node excludes new sessions."""
    drained: bool
    cordon: CordonEntry | None
    """The cordon of this GPU only."""
    bar: tuple[SegmentEntry, ...]


class NodeEntry(ApiModel):
    """One machine with GPUs."""

    name: str
    published_at: float
    cordoned: bool
    drained: bool
    cordon: CordonEntry | None
    host_memory: HostMemoryReport | None
    """Host memory for paged-out GPU memory."""
    layers: tuple[str, ...]
    """Titles of other sharing layers that share GPUs of this node without an agent's report."""
    gpus: tuple[GpuEntry, ...]
    unconfirmed: tuple[UnconfirmedSession, ...]
    """Sessions in the node's report that no pod confirms. They are not counted. Only for admins; empty for others."""


class NodePage(ApiModel):
    """A page of nodes, by name."""

    total: int
    offset: int
    nodes: tuple[NodeEntry, ...]


class NextAction(ApiModel):
    """The next idle action, if nothing changes."""

    tier: Tier
    units: int
    at: float
    in_seconds: float
    notified: bool
    """Whether the user has a notice of it."""
    dry_run: bool
    """Whether the action is only simulated."""
    action: str
    reason: str


class KeepLimitsAnswer(ApiModel):
    """Limits on the keeps of the session's user. If any limit is 0, the user may not keep shares."""

    longest_seconds: float
    per_day: int
    """Maximum keeps within 24 hours, over all sessions of the user."""
    at_once: int
    """Maximum number of the user's sessions kept at the same time."""
    left: int
    """Remaining keeps of `per_day`."""
    again_at: float | None
    """The time at which the user can keep a share again, seconds since the epoch; null: now, or never."""


class SessionEntry(ApiModel):
    """One notebook server with a share."""

    id: str
    node: str
    user: str
    server: str
    """The server's name; empty: the default server."""
    own: bool
    may_act: bool
    """Whether the caller may act on it."""
    template: str
    display_name: str
    group: str
    """The group to which the session is charged; empty: none."""
    gpus: tuple[int, ...]
    """Indices of its GPUs on its node; empty if another sharing layer provides the GPU and no agent knows the index."""
    gpu_count: int
    layer: LayerName
    """The sharing layer that provides the GPU."""
    layer_title: str
    layer_trouble: str
    """The layer's problem with this session; empty: no known problem."""
    sharing: str
    """The effect of the layer on the session, as sentences; empty for `native`."""
    measured: bool
    """Whether an agent measures its GPU work. If not, the figures for GPU work and memory are 0."""
    tier: Tier
    starting: bool
    opened_at: float
    share_units: int
    last_units: int
    """Units of the share on the last GPU if these are fewer; 0: as many."""
    borrowed_units: int
    """The most of `borrowed_each`."""
    borrowed_each: tuple[int, ...]
    """Borrowed units on each of its GPUs."""
    effective_units: int
    guaranteed_units: int
    time_limit_units: int
    """Maximum part of each GPU's time that the session gets, even when it is alone on the GPU; 100: no limit."""
    gpu_busy: bool
    waiting: bool
    gpu_worked: bool
    gpu_idle_seconds: float
    gpu_seconds: float
    delivered: DeliveredReport
    """Entitled and received GPU time while other sessions competed."""
    kernels: int | None
    kernels_busy: int | None
    memory_bytes: int
    resident_bytes: int
    memory_limit_bytes: int
    engine: MemoryEngine
    suspended: bool
    """Whether all its processes are suspended, with its memory and CUDA contexts in host memory."""
    not_suspendable: str
    """The reason why a session with engine `suspend` cannot be suspended or resumed now; empty: it can."""
    context_bytes: int
    """GPU memory of its CUDA contexts, in addition to `memory_bytes`."""
    over_memory_limit: bool
    memory_limit_hits: int
    host_memory_needed_bytes: int
    host_memory_budget_bytes: int | None
    short_work: str
    """For callers that see all sessions: a note that short GPU work did not keep the share; otherwise empty."""
    bypassing: int
    """Number of processes that use the GPU with the library removed."""
    exceeding: tuple[BypassingProcess, ...]
    """Those of them without which the session would be within its memory limit."""
    offer: str
    """The benefit of a restart, as a sentence."""
    lacking: str
    why: str
    """The reason why no idle action is due."""
    next: NextAction | None
    quota: str | None
    """The name of the quota to which the session is charged; null: there are no quotas."""
    in_quota: bool | None
    keep: Keep | None
    exemption: Exemption | None
    message: Message | None
    """The last of `messages`."""
    background: bool
    """Whether it works only in GPU time and memory that no other session uses, because a budget is used up."""
    messages: tuple[Message, ...]
    """Admins' messages to the session's user, earliest first, at most one per cause."""
    keep_limits: KeepLimitsAnswer
    share_choices: tuple[int, ...]
    """Shares that the caller can choose if they are free, smallest first, in units of 1 % on each of the session's
    GPUs; 150 is a whole GPU and half of another. An admin can also choose any other share."""
    largest_share_units: int
    """The largest share for which the session's GPU currently has free or lent units."""


class AdviceEntry(ApiModel):
    """What the last days' GPU work of a user with a template says about the size of the share."""

    user: str
    template: str
    group: str
    """The group to which the share is charged; empty: none."""
    units: int
    """The share that the user had, in units of 1 % of a GPU."""
    advised_units: int
    """The share that would have been better; equal to `units`: no advice."""
    text: str
    """The advice as a sentence; empty: none."""
    since: float
    """The first counted burst of GPU work."""
    until: float
    bursts: int
    gpu_seconds: float
    waited_seconds: float
    """Time that other sessions added to the bursts."""
    later: int
    """Number of bursts that would have ended noticeably later with the advised share."""
    later_seconds: float
    """Sum of the seconds by which they would have ended later."""
    saved_seconds: float
    """Wait that a larger share would have saved."""
    freed_gpu_seconds: float
    """GPU time that a smaller share would have left to others: units by the time that the user held them."""
    memory_p50_bytes: int
    memory_p95_bytes: int
    memory_peak_bytes: int
    computed_at: float


class AdviceSum(ApiModel):
    """What could be won with the advised shares, for a template and a group."""

    template: str
    group: str
    users: int
    """Number of users with advice."""
    freed_gpu_seconds: float
    saved_seconds: float


class AdviceAnswer(ApiModel):
    """Advice on the size of shares. Users see only advice for themselves."""

    advice: tuple[AdviceEntry, ...]
    sums: tuple[AdviceSum, ...]
    """Sums of the advice for work of the last 7 days by template and group, largest first."""


class Sessions(ApiModel):
    """A page of sessions."""

    total: int
    """Number of sessions that match the filters."""
    offset: int
    others: int
    """Number of sessions that the caller may not see."""
    sessions: tuple[SessionEntry, ...]


class SpawnEntry(ApiModel):
    """A spawn that waits for free GPU capacity."""

    address: str
    """Path below the API's prefix for requests about this spawn."""
    position: int
    """Position in the queue, first = 1. Only spawns that could use the same GPUs count."""
    user: str
    server: str
    own: bool
    may_act: bool
    template: str
    display_name: str
    priority: str
    """`low`, `normal` or `high`: that of its template."""
    share: str
    since: float | None
    seconds: float | None
    estimated_minutes: int | None
    """Estimate of the remaining wait: half of such spawns have started by then; null: unknown."""
    earliest_minutes: int | None
    """Four of five such spawns start between this and `latest_minutes`, as on the hub's page for the spawn; null:
    unknown."""
    latest_minutes: int | None
    waits_for: str
    """The reason for the wait, as a sentence; empty: unknown."""
    cancelled_at: float | None
    """The time at which the spawn is cancelled if it still waits; null: unknown."""


class Queue(ApiModel):
    """The waiting spawns."""

    known: bool
    """False: the hub does not report its queue."""
    spawns: tuple[SpawnEntry, ...]
    others: int
    """Number of spawns that the caller may not see."""


class QuotaResource(ApiModel):
    """CPU or memory in a quota: millicores, or bytes."""

    used: int
    guaranteed: int | None
    """Guaranteed amount; null: no guarantee."""
    maximum: int | None
    """Maximum amount; null: no maximum."""

    @classmethod
    def of(cls, quota: Quota, resource: Resource, used: ResourceAmounts) -> QuotaResource:
        """Return the use of a resource of a quota."""
        number = list(Resource).index(resource)
        return cls(used=used[number], guaranteed=quota.guaranteed[number], maximum=quota.maxima[number])


class QuotaAnswer(ApiModel):
    """A quota in use. Amounts are units of 1 % of a GPU."""

    kind: AccountKind
    name: str
    department: str
    """The groups that contain it, the outermost first, separated by " / "; empty: none."""
    guaranteed_units: int
    maximum_units: int | None
    """Maximum units; null: no maximum."""
    weight: float
    used_units: int
    over_units: int
    """Units of its sessions over quota."""
    sessions: int
    cpu: QuotaResource
    """CPU in millicores, counted only if a quota guarantees or limits CPU or memory."""
    memory: QuotaResource
    """Host memory in bytes, counted in the same way."""


class BudgetAnswer(ApiModel):
    """A budget of GPU-hours."""

    account: str
    """The quota with the budget, like `group:optics`, `user:ada` or `default:bob`."""
    user: str
    """The user, of a budget of each user in the quota; empty: all its servers use it together."""
    hours: float
    """GPU-hours that can be used within the window, granted ones included."""
    granted: float
    """The part of them that admins have granted for a time."""
    used: float
    left: float
    used_up: bool
    counted: str
    """held or delivered."""
    window: float | None
    """Length of a rolling window in seconds; null: a term."""
    ends_at: float | None
    """End of a term, in seconds since the epoch."""
    more_at: float | None
    """When something is left again if it is used up, else when the oldest use leaves the window; null: never."""
    text: str
    """What is left, as a phrase."""

    @classmethod
    def of(cls, state: BudgetState) -> BudgetAnswer:
        """Return a budget's state as an answer."""
        names = ("left", "used_up")
        return cls(**state.model_dump(), **{name: getattr(state, name) for name in names}, text=budget_left(state))


class QuotasAnswer(ApiModel):
    """The quotas and budgets in force."""

    known: bool
    """False: there are no quotas."""
    quotas: tuple[QuotaAnswer, ...]
    budgets: tuple[BudgetAnswer, ...] = ()
    """Budgets of GPU-hours, least left first."""


class HistoryAnswer(ApiModel):
    """GPU time. Amounts are GPU-hours, but for `energy` (kWh), `co2` (kg), and the prices `cost` and `saved`."""

    since: float
    until: float
    by: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    """Rows, each with its keys (`user`, `group`, ...) and the amounts."""


class ActionAnswer(ApiModel):
    """An idle action, or a user's or admin's action."""

    id: int
    at: float
    action: str
    actor: str
    user: str
    server: str
    template: str
    group: str
    node: str
    units: int
    cause: str
    reason: str
    dry_run: bool


class ActionsAnswer(ApiModel):
    """Actions, newest first."""

    actions: tuple[ActionAnswer, ...]


class Document(RootModel[dict[str, Any]]):
    """An OpenAPI 3.1 document."""
