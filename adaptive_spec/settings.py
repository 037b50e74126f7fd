"""One tree of settings: defaults < TOML file < environment < flags.

The file is ``adaptive-spec.toml`` in the working directory or the one that ADAPTIVE_SPEC_CONFIG names.  Environment
variables are ADAPTIVE_SPEC_<SECTION>__<NAME>.  Flags arrive as the ``overrides`` of ``load_settings``.
"""

import os
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from adaptive_spec.core import CALIBRATED_VERIFIERS, Rule
from adaptive_spec.errors import SettingsError
from adaptive_spec.redaction import MASK, hide_all, hide_secrets

CONFIG_VARIABLE = "ADAPTIVE_SPEC_CONFIG"


def data_dir() -> Path:
    """Where models, releases and the default database live."""
    return Path(platformdirs.user_data_dir("adaptive-spec"))


Drafter = Literal["model", "ngram", "combined"]
Verifier = Literal["exact", "ngram", "logits", "hybrid", "typical", "topk_relaxed"]
Origin = Annotated[str, Field(pattern=r"^https?://[^/*\s]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hide_secrets(value) if isinstance(value, str) else value


class ModelSettings(_Section):
    """Which models, and how they are loaded."""

    target: str = "smollm2-135m"
    draft: str = "bundled"  # "bundled": the draft that ships for the target; else a hub id or a folder
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "cpu"
    threads: int = Field(default=0, ge=0)  # 0: all cores; while a run trains, those it leaves


class DecoderSettings(_Section):
    """The live decoder."""

    slots: int = Field(default=8, ge=1)
    max_context_tokens: int = Field(default=1024, ge=16)
    prefill_chunk_tokens: int = Field(default=256, ge=1)
    max_chain_length: int = Field(default=6, ge=0)
    policy: Literal["stopping", "threshold"] = "stopping"
    explore_share: float = Field(default=0.02, ge=0, le=1)  # of decoding time
    queue_limit: int = Field(default=256, ge=1)
    request_timeout_seconds: float = Field(default=0.0, ge=0)  # longest and default deadline; 0: none
    drain_seconds: float = Field(default=10.0, ge=0)  # what running requests get when the service stops
    answer_cache_tokens: int = Field(default=0, ge=0)  # held of finished greedy requests; 0: none are kept
    drafter: Drafter = "model"
    domain_drafters: dict[str, Drafter] = Field(default_factory=dict)  # of domains for which it is another
    ngram_min_match: int = Field(default=2, ge=1)
    ngram_max_match: int = Field(default=5, ge=1)
    ngram_trusted_match: int = Field(default=3, ge=1)  # combined: the shortest match that goes before the model
    ngram_store_tokens: int = Field(default=20_000, ge=0)  # of past outputs, per domain; 0: none are kept
    prefix_cache_tokens: int = Field(default=4096, ge=0)  # of prompts whose KV is kept for the next ones; 0: none
    static_shapes: Literal["auto", "on", "off"] = "auto"  # auto: on a device and where forwards are compiled
    compile: Literal["off", "default", "reduce-overhead", "max-autotune"] = "off"


class VerificationSettings(_Section):
    """Which rule decides what is kept of a chain.  All but ``exact`` are relaxed and run under a divergence budget."""

    verifier: Verifier = "exact"
    domain_verifiers: dict[str, Verifier] = Field(default_factory=dict)  # of domains for which it is another
    allowed: tuple[Verifier, ...] = ()  # relaxed verifiers that requests and releases may choose
    divergence_budget: float = Field(default=0.02, ge=0, le=1)  # largest share of diverging tokens; 0: exact
    domain_budgets: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    budget_window_tokens: int = Field(default=1000, ge=1)  # unspent budget is kept for so many tokens
    budget_confidence: float = Field(default=0.9, gt=0, lt=1)  # that calibrated thresholds keep the budget
    evidence_share: float = Field(default=0.05, ge=0, le=1)  # of steps measured for that; 0: thresholds stay as set
    ngram_size: int = Field(default=2, ge=1, le=16)
    min_overlap: float = Field(default=0.5, ge=0, le=1)
    similarity: Literal["cosine", "kl", "reverse_kl", "js", "tv"] = "tv"
    min_similarity: float = Field(default=0.7, ge=0, le=1)
    typical_epsilon: float = Field(default=0.09, ge=0, le=1)
    typical_delta: float = Field(default=0.3, ge=0)
    relaxed_top_k: int = Field(default=10, ge=1)
    relaxed_delta: float = Field(default=0.3, ge=0, le=1)

    def rule(self, domain: str) -> Rule:
        """The rule of a domain for which no request and no release says another."""
        numbers = {field.name: getattr(self, field.name) for field in fields(Rule)}
        return Rule(**{**numbers, "verifier": self.domain_verifiers.get(domain, self.verifier)})

    def choice(self, domain: str, learned: Rule | None, wanted: str | None = None) -> Rule:
        """The rule in force: the request's verifier, else the operator's for the domain, the release's, the setting's.

        What a release learned for one verifier says nothing of another, so its numbers serve that verifier alone.  It
        may always fall back to ``exact``.

        Args:
            learned: the rule that the release has for the domain.
            wanted: the verifier that a request names.
        """
        configured = self.rule(domain)
        verifier = configured.verifier
        if learned is not None and self.permits(learned.verifier, domain):
            bound = domain in self.domain_verifiers and learned.verifier != "exact"
            verifier = verifier if bound else learned.verifier
        verifier = wanted or verifier
        numbers = learned if learned is not None and learned.verifier == verifier else configured
        return replace(numbers, verifier=verifier)

    def calibrated(self, domain: str) -> tuple[str, ...]:
        """The relaxed verifiers whose thresholds are fitted to a domain's evidence; none where nothing may relax.

        The one that the operator set, else, where the operator did not set ``exact`` for the very domain, the allowed
        ones.  ``typical`` and ``topk_relaxed`` stay as they are set.
        """
        own = self.domain_verifiers.get(domain, self.verifier)
        chosen = (own,) if own != "exact" else () if domain in self.domain_verifiers else self.allowed
        if not self.evidence_share or not self.budget(domain):
            return ()
        return tuple(name for name in CALIBRATED_VERIFIERS if name in chosen)

    def permits(self, verifier: str, domain: str) -> bool:
        """Whether a request or a release may choose it."""
        return verifier in ("exact", self.domain_verifiers.get(domain, self.verifier), *self.allowed)

    def budget(self, domain: str) -> float:
        """The divergence budget of a domain."""
        return self.domain_budgets.get(domain, self.divergence_budget)


class RecordSettings(_Section):
    """The database, and what is written to it."""

    url: str = Field(default_factory=lambda: f"sqlite:///{data_dir() / 'adaptive_spec.db'}")
    folder: Path = Field(default_factory=lambda: data_dir() / "traces")
    enabled: bool = True
    queue_rows: int = Field(default=20_000, ge=1)
    flush_seconds: float = Field(default=0.5, gt=0)
    trace_top_k: int = Field(default=64, ge=1)
    trace_share: float = Field(default=1.0, ge=0, le=1)
    untraced_domains: tuple[str, ...] = ()  # whose requests are as if each had asked not to be recorded
    held_out_share: float = Field(default=0.2, gt=0, lt=1)
    trace_quota: int = Field(default=4000, ge=2)  # traces per domain
    domain_quotas: dict[str, Annotated[int, Field(ge=2)]] = Field(default_factory=dict)  # where it is another
    recent_share: float = Field(default=0.5, ge=0, le=1)  # of a quota, for the newest; the rest samples all before
    trace_days: float = Field(default=90.0, ge=0)  # older ones go; 0: never
    trace_bytes: int = Field(default=4_000_000_000, ge=0)  # of all traces together; 0: no limit
    min_held_out_traces: int = Field(default=20, ge=0)  # per domain, the last to go for the sake of trace_bytes
    sweep_seconds: float = Field(default=60.0, gt=0)


class LearningSettings(_Section):
    """One training run."""

    loss: Literal["kl", "reverse_kl", "jsd", "tv", "lk_hybrid"] = "jsd"
    cross_entropy_weight: float = Field(default=0.1, ge=0)
    survival_tokens: int = Field(default=0, ge=0)  # of would-be chains that must reach a token; 0: all count alike
    error_weight: float = Field(default=1.0, ge=0)  # of tokens on which the draft's choice is not the target's
    skip_confidence: float = Field(default=1.0, ge=0, le=1)  # surer tokens on which it is are left out
    replay_share: float | None = Field(default=None, ge=0, lt=1)  # of older tokens beside fresh; None: all alike
    rank: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    batch_tokens: int = Field(default=1024, ge=1)
    accumulate: int = Field(default=1, ge=1)  # batches per optimiser step
    max_epochs: int = Field(default=8, ge=1)
    time_limit_seconds: float = Field(default=600.0, gt=0)  # of work, over all processes of a run; pauses do not count
    checkpoint_seconds: float = Field(default=30.0, ge=0)  # between two; 0: none, a killed run cannot go on
    min_traces: int = Field(default=20, ge=2)
    vocabulary_tokens: int = Field(default=8192, ge=0)  # that a release's draft may propose, by traffic; 0: all
    memory_limit_bytes: int = Field(default=0, ge=0)  # of the child's data; 0: none
    threads: int = Field(default=1, ge=1)
    nice: int = Field(default=10, ge=0, le=19)
    max_slowdown_share: float = Field(default=0.5, ge=0, le=1)  # of decoding speed, lost to a run; then it pauses
    seed: int = 0
    own_max_domains: int = Field(default=4, ge=0)  # for which a run trains an adapter of their own; 0: none
    own_margin_share: float = Field(default=0.02, ge=0)  # by which a domain's own adapter must beat the shared one
    own_min_requests: int = Field(default=20, ge=5)  # of a domain beside those trained on, to judge that at all


class CalibrationSettings(_Section):
    """Temperatures and thresholds."""

    min_observations: int = Field(default=50, ge=2)
    blend_observations: int = Field(default=64, ge=0)  # that the pooled numbers weigh beside a domain's own
    later_share: float = Field(default=0.5, gt=0, lt=1)  # of a domain's requests: judge what the earlier ones taught
    tolerated_loss_share: float = Field(
        default=0.01, ge=0
    )  # of goodput, by which a domain's own scaling may look worse
    cost_hours: float = Field(default=168.0, ge=0)  # measured costs are believed for so long; 0: measure at every start
    override_hours: float = Field(default=24.0, gt=0)  # that thresholds set by hand last, unless told otherwise
    override_max_hours: float = Field(default=168.0, gt=0)  # at most


class DriftSettings(_Section):
    """Change detection on acceptance and calibration, per domain."""

    enabled: bool = True
    triggers: Literal["events", "calibrate", "retrain"] = "calibrate"  # beside the event
    false_alarm_steps: int = Field(default=100_000, ge=1_000)  # one at most in so many, per domain and drafter
    min_steps: int = Field(default=1_000, ge=100)  # after a release or a drift; they are what later ones are held to
    cooldown_hours: float = Field(default=6.0, ge=0)  # between two actions of one kind
    poll_seconds: float = Field(default=5.0, gt=0)


class ReleaseSettings(_Section):
    """Bundles and the gate."""

    folder: Path = Field(default_factory=lambda: data_dir() / "releases")
    store: str = ""  # URL that machines share, opened by fsspec; empty: the folder is all there is
    max_domain_loss_share: float = Field(default=0.01, ge=0)
    golden_prompts: int = Field(default=4, ge=0)  # held-out ones that a candidate must answer as the target alone does
    poll_seconds: float = Field(default=1.0, gt=0)
    canary_share: float = Field(default=0.0, ge=0, lt=1)  # of requests, for a release on trial; 0: live at once
    canary_margin_share: float = Field(default=0.05, gt=0, lt=1)  # a loss that a promotion may overlook
    canary_level: float = Field(default=0.05, gt=0, lt=0.5)  # probability of rolling back one that is as good
    canary_max_requests: int = Field(default=1000, ge=1)  # of the canary's own; then the default decides
    canary_max_hours: float = Field(default=24.0, gt=0)  # as well
    canary_default: Literal["promote", "rollback"] = "promote"  # the gate let it pass, and nothing spoke against it


class ScheduleSettings(_Section):
    """When the service retrains and recalibrates by itself.  0 turns a job off."""

    retrain_hours: float = Field(default=24.0, ge=0)
    retrain_new_traces: int = Field(default=0, ge=0)  # that call for a run
    retrain_age_hours: float = Field(default=0.0, ge=0)  # since the last run that learned, when there is anything new
    min_new_traces: int = Field(default=20, ge=0)  # fewer: no run that nobody asked for
    cooldown_hours: float = Field(default=1.0, ge=0)  # between two of those, at least
    min_expected_gain_share: float = Field(
        default=0.005, ge=0
    )  # of acceptance length; less: no run by itself but drift's
    poll_seconds: float = Field(default=60.0, gt=0)  # how often volume and age are looked at
    calibrate_hours: float = Field(default=1.0, ge=0)
    rollup_seconds: float = Field(default=60.0, ge=0)
    prune_hours: float = Field(default=1.0, ge=0)


class RetentionSettings(_Section):
    """How long records stay; 0: for ever.  Traces have limits of their own, in ``records``."""

    outcome_days: float = Field(default=30.0, ge=0)  # steps and requests, once they are rolled up
    outcome_steps: int = Field(default=10_000_000, ge=0)  # the newest; those before go earlier
    minute_days: float = Field(default=2.0, ge=0)  # rollups per minute
    hour_days: float = Field(default=90.0, ge=0)  # rollups per hour, at least as long as minutes; days stay
    evidence_days: float = Field(default=90.0, ge=0)  # measured chains
    event_days: float = Field(default=365.0, ge=0)
    calibration_days: float = Field(default=90.0, ge=0)  # the last of each domain and release stays
    checkpoint_days: float = Field(default=7.0, ge=0)  # of runs that ended
    releases: int = Field(default=20, ge=0)  # newest bundles, beside those that must stay


class ClusterSettings(_Section):
    """What this process does, among others on the same database."""

    role: Literal["all", "decoder", "trainer"] = "all"  # a decoder never trains, a trainer never decodes
    heartbeat_seconds: float = Field(default=2.0, gt=0)  # between signs of life, and looks at who leads
    gone_seconds: float = Field(default=10.0, gt=0)  # without a sign, after which a process counts as gone
    forget_hours: float = Field(default=24.0, gt=0)  # after which one that is gone leaves the list


class MetricsSettings(_Section):
    """What /metrics tells."""

    max_domains: int = Field(default=50, ge=1)  # with series of their own, the first that came; the rest is "other"


class LogSettings(_Section):
    """Log lines of ``serve``."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class SpanSettings(_Section):
    """OpenTelemetry spans.  Where they go is up to its own OTEL_ variables."""

    enabled: bool = False  # needs the extra ``otel``


class ServerSettings(_Section):
    """HTTP."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    token: str = Field(default="", repr=False)  # opens every route; where host is not loopback it or the next must be
    token_file: Path = Field(default_factory=lambda: data_dir() / "tokens.json")  # hashes of further tokens
    read_needs_token: bool = False  # control routes that only read, metrics and the page
    api_needs_token: bool = False  # /v1
    allowed_hosts: tuple[str, ...] = ()  # names by which clients may call it, beside this machine's own
    allowed_origins: tuple[Origin, ...] = ()  # of pages elsewhere that may use it from a browser
    log_text: bool = False  # errors met while serving are logged with their messages, which may quote requests


class LimitSettings(_Section):
    """What one request to /v1, one client and all clients together may ask for.  0: no limit."""

    body_bytes: int = Field(default=2_000_000, ge=0)  # of any request's body
    body_seconds: float = Field(default=60.0, ge=0)  # for a body to arrive
    prompt_tokens: int = Field(default=0, ge=0)  # beside decoder.max_context_tokens
    concurrent_requests: int = Field(default=1024, ge=0)  # that are read, wait or are answered
    client_requests: int = Field(default=0, ge=0)  # the same of one client
    client_requests_per_minute: int = Field(default=0, ge=0)
    client_tokens_per_minute: int = Field(default=0, ge=0)  # of prompts and answers


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        env_prefix="ADAPTIVE_SPEC_", env_nested_delimiter="__", extra="forbid", frozen=True
    )

    model: ModelSettings = ModelSettings()
    decoder: DecoderSettings = DecoderSettings()
    verification: VerificationSettings = VerificationSettings()
    records: RecordSettings = Field(default_factory=RecordSettings)
    learning: LearningSettings = LearningSettings()
    calibration: CalibrationSettings = CalibrationSettings()
    drift: DriftSettings = DriftSettings()
    releases: ReleaseSettings = Field(default_factory=ReleaseSettings)
    schedule: ScheduleSettings = ScheduleSettings()
    retention: RetentionSettings = RetentionSettings()
    cluster: ClusterSettings = ClusterSettings()
    server: ServerSettings = Field(default_factory=ServerSettings)
    limits: LimitSettings = LimitSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    spans: SpanSettings = SpanSettings()

    def in_effect(self) -> dict[str, Any]:
        """``shown``, and the source of each that is not the default: ``file``, ``environment`` or ``flag``."""
        return {"settings": self.shown(), "sources": self.sources}

    def shown(self) -> dict[str, Any]:
        """The tree as JSON has it, for anybody's eyes: without tokens, and without passwords in URLs."""
        shown: dict[str, dict[str, Any]] = hide_all(self.model_dump(mode="json"))
        for section, values in self:
            # What stays out of repr is a secret whole.
            secrets = [name for name, field in type(values).model_fields.items() if not field.repr]
            shown[section] |= {name: MASK for name in secrets if shown[section][name]}
        return shown

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> dict[str, str]:
        """Where ``load_settings`` had what is not the default from: section.name -> flag, environment or file."""
        return dict(self._sources)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, _TomlSource(settings_cls))


class _TomlSource(PydanticBaseSettingsSource):
    def get_field_value(self, field: Any, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        named = os.environ.get(CONFIG_VARIABLE)
        path = Path(named or "adaptive-spec.toml")
        if not path.exists():
            if named:
                raise SettingsError(f"{CONFIG_VARIABLE} names {path}, which does not exist. Create it or unset it.")
            return {}
        try:
            return tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise SettingsError(f"{path} is not valid TOML: {error}. Correct the file.") from error


def placed_at(reference: str) -> dict[str, dict[str, Any]]:
    """Return overrides for ``load_settings`` that take the records from where ``reference`` says.

    Args:
        reference: a database URL, a SQLite file, or a folder with one.  Beside such a file the folders ``traces`` and
            ``releases`` are taken where they exist, as they lie in a service's data folder; else those of the settings.

    Raises:
        SettingsError: there is no such file, or not one in the folder.
    """
    if "://" in reference and not reference.startswith("sqlite:///"):
        return {"records": {"url": reference}}
    path = Path(reference.removeprefix("sqlite:///")).expanduser()
    if path.is_dir():
        files = sorted(path.glob("*.db"))
        if len(files) != 1:
            raise SettingsError(
                f"{path} holds {len(files)} databases (*.db). Name the folder that holds the one of the traces and, in "
                "`traces`, their shards; or a database."
            )
        path = files[0]
    if not path.is_file():
        raise SettingsError(f"There is no database {path}. Name a database URL, a SQLite file or a folder with one.")
    beside = {name: path.parent / name for name in ("traces", "releases") if (path.parent / name).is_dir()}
    return {
        "records": {"url": f"sqlite:///{path}", "folder": beside.get("traces")},
        "releases": {"folder": beside.get("releases")},
    }


def load_settings(overrides: dict[str, dict[str, Any]] | None = None) -> Settings:
    """Read the tree; ``overrides`` (section -> name -> value, None values ignored) win.

    Raises:
        SettingsError: an unknown name or a bad value, naming each.
    """
    given = {
        section: {name: value for name, value in values.items() if value is not None}
        for section, values in (overrides or {}).items()
    }
    try:
        settings = Settings(**{section: values for section, values in given.items() if values})  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise SettingsError(f"Bad settings: {problems}. See docs/quickstart.md for every setting.") from error
    for source, values in (
        ("file", _TomlSource(Settings)()),
        ("environment", EnvSettingsSource(Settings)()),
        ("flag", given),
    ):
        settings._sources.update({f"{section}.{name}": source for section in values for name in values[section]})
    return settings
