"""The bodies of what the control plane is told to do."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from adaptive_spec.serving.bodies import Text

Words = Annotated[Text, Field(pattern=r"^[^\x00]*$")]  # what databases can store


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)  # true is no number


class RetrainBody(_Body):
    """Why the run is asked for; ``force``: also with too little data; ``resume``: go on with the interrupted one."""

    trigger: Words = Field(default="person", min_length=1, max_length=64)
    resume: bool = False
    force: bool = False


class CalibrateBody(_Body):
    """Which domain to refit; None: all."""

    domain: Words | None = None


class RollbackBody(_Body):
    """Which release to put live; None: the parent of the live one."""

    to: int | None = Field(default=None, ge=0, le=2**31 - 1)
    reason: Words = Field(default="asked for", max_length=500)


class CanaryBody(_Body):
    """What becomes of the release on trial."""

    action: Literal["promote", "abort"]
    reason: Words = Field(default="asked for", max_length=500)


class PublishBody(_Body):
    """Why this release goes live; ``force``: also over the gate's refusal, and then a reason is needed."""

    reason: Words = Field(default="", max_length=500)
    force: bool = False


class OverrideBody(_Body):
    """Numbers of a domain that are set by hand, why, and for how many hours; see ``core.ThresholdOverride``."""

    temperature: float | None = None
    offset: float | None = None
    warmth: float | None = None
    stop_below: float | None = None
    max_chain_length: int | None = Field(default=None, ge=0)
    reason: Words = Field(min_length=1, max_length=500)
    hours: float | None = Field(default=None, gt=0)


class ReasonBody(_Body):
    """Why an override or a run ends before its time."""

    reason: Words = Field(default="asked for", min_length=1, max_length=500)
