"""The OpenAI request bodies that are understood, and how each becomes a ``Request``.

A parameter that would change the answer and is not supported is refused, never ignored.
"""

from typing import Annotated, Any, Literal
from uuid import uuid4

from jinja2 import TemplateError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from adaptive_spec.core import (
    DEFAULT_DOMAIN,
    DOMAIN_NAME,
    LEAST_REPETITION_PENALTY,
    MOST_REPETITION_PENALTY,
    Request,
    SamplingParams,
)
from adaptive_spec.errors import RequestError
from adaptive_spec.settings import Drafter, Settings, Verifier

MOST_CHOICES = 8
MOST_STOPS = 4
MOST_STOP_CHARACTERS = 256  # of each: so much text is held back at most, and searched with every token
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions; a chat gets what the context leaves
# Parameters refused when they ask for something: name -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),  # of completions
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "prediction": (),
    "audio": (),
}


def _of_characters(text: str) -> str:
    """Refuse text that UTF-8 cannot write, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair is no character; send whole ones") from None
    return text


Text = Annotated[str, AfterValidator(_of_characters)]
Stop = Annotated[str, Field(max_length=MOST_STOP_CHARACTERS), AfterValidator(_of_characters)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # true is no number


class Speculation(BaseModel):
    """The extension field.

    drafter: None takes the decoder's.  chain_length: None follows the length policy, 0 turns speculation off.
    adapter: the domain whose own adapter drafts; None takes the request's domain, "shared" the shared one.
    verifier: None takes the domain's; a relaxed one must be allowed by the operator.
    record: False keeps no trace and no output of this request.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    drafter: Drafter | None = None
    adapter: str | None = None
    chain_length: int | None = Field(default=None, ge=0)
    verifier: Verifier | None = None
    record: bool = True


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool = False


class GenerationBody(_Body):
    """What both completion routes share."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    deadline_seconds: float | None = Field(default=None, gt=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=LEAST_REPETITION_PENALTY, le=MOST_REPETITION_PENALTY)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    speculation: Speculation = Speculation()

    def refuse_unsupported(self) -> None:
        """Raise RequestError for a parameter that would change the answer and is not supported."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                raise RequestError(f"{name}={value!r} is not supported. Leave {name} out.")

    def domain(self, header: str | None) -> str:
        """The domain of ``metadata.domain``, else of the X-Domain header, else the default."""
        named = (self.metadata or {}).get("domain") or header or DEFAULT_DOMAIN
        if not DOMAIN_NAME.fullmatch(named):
            raise RequestError(f"Domain {named!r} is not a name: use 1 to 64 of A-Z a-z 0-9 _ . : / -.")
        return named

    def wanted_tokens(self) -> int | None:
        """The limit the client set, None for the route's default."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """How many alternatives to list beside each token's log-prob, None for no log-probs."""
        raise NotImplementedError


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """Tokenize the prompt."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise RequestError("Several prompts in one request are not supported. Send one request each.")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return list(tokenizer(prompt)["input_ids"])
        return [_checked_id(token, len(tokenizer)) for token in prompt]

    def wanted_tokens(self) -> int | None:
        return self.max_tokens or COMPLETION_MAX_TOKENS

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class Part(_Body):
    """A piece of a message's content; only text is understood."""

    type: Literal["text"]
    text: Text


class Message(_Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]

    def flat(self) -> dict[str, str]:
        """The message as chat templates want it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    def prompt_ids(self, tokenizer: Any) -> list[int]:
        """Write the messages through the model's chat template and tokenize them."""
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("This model has no chat template. Use /v1/completions.")
        messages = [message.flat() for message in self.messages]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise RequestError(f"The model's chat template refused the messages: {error}") from error
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true. Set it, or leave top_logprobs out.")
        return self.top_logprobs or 0 if self.logprobs else None


def to_request(
    body: CompletionBody | ChatBody, header_domain: str | None, tokenizer: Any, settings: Settings, prefix: str
) -> Request:
    """Check a body and make the engine's request of it.

    Raises:
        RequestError: an unsupported parameter, a bad domain, or a prompt that is empty or too long.
    """
    body.refuse_unsupported()
    prompt_ids = body.prompt_ids(tokenizer)
    limit = settings.decoder.max_context_tokens
    longest = settings.limits.prompt_tokens
    room = limit - len(prompt_ids)
    wanted = body.wanted_tokens()
    if not prompt_ids:
        raise RequestError("The prompt is empty. Send at least one token.")
    if longest and len(prompt_ids) > longest:
        raise RequestError(
            f"The prompt has {len(prompt_ids)} tokens; {longest} are allowed. "
            "Shorten it, or ask the operator to raise limits.prompt_tokens."
        )
    if room < (wanted or 1):
        raise RequestError(
            f"The prompt has {len(prompt_ids)} tokens and {wanted or 1} more were asked for; "
            f"the context holds {limit}. "
            "Shorten the prompt, lower max_tokens or raise decoder.max_context_tokens."
        )
    return Request(
        request_id=f"{prefix}-{uuid4().hex}",
        prompt_ids=tuple(prompt_ids),
        params=_params(body, wanted or room),
        domain=body.domain(header_domain),
    )


def _params(body: GenerationBody, max_tokens: int) -> SamplingParams:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        n=body.n or 1,
        logprobs=body.wanted_logprobs(),
        deadline_seconds=body.deadline_seconds,
        stop=tuple(text for text in stop if text),
        ignore_eos=body.ignore_eos,
        drafter=body.speculation.drafter,
        adapter=body.speculation.adapter,
        chain_length=body.speculation.chain_length,
        verifier=body.speculation.verifier,
        record=body.speculation.record,
    )


def _checked_id(token: Any, vocabulary: int) -> int:
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        raise RequestError(f"Token id {token!r} is not in the vocabulary of {vocabulary} tokens.")
    return token
