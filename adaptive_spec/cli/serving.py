"""Commands that decode: serve, generate, chat."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from adaptive_spec.cli.apps import app
from adaptive_spec.cli.asking import service_at
from adaptive_spec.cli.options import Json, Token, Url
from adaptive_spec.cli.output import print_json, report
from adaptive_spec.errors import AdaptiveSpecError
from adaptive_spec.serving.client import Client, UnreachableError


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model.")] = None,
    draft: Annotated[str | None, typer.Option(help="Draft model.")] = None,
    role: Annotated[
        str | None,
        typer.Option(help="all, decoder (never trains) or trainer (never decodes), among several processes."),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text, or json: an object a line.")] = None,
) -> None:
    """Serve the OpenAI-compatible API and learn from its traffic."""
    from adaptive_spec.settings import load_settings

    settings = load_settings(
        {
            "server": {"host": host, "port": port},
            "model": {"target": target, "draft": draft},
            "cluster": {"role": role},
            "log": {"level": log_level, "format": log_format},
        }
    )
    from adaptive_spec.serving.app import check_bind, create_app
    from adaptive_spec.serving.logs import quieten_libraries, withhold_text

    check_bind(settings.server)
    from adaptive_spec.telemetry.logs import configure

    configure(settings.log.level, settings.log.format)
    quieten_libraries()
    if not settings.server.log_text:
        withhold_text()

    from adaptive_spec.service import Service
    from adaptive_spec.serving.server import exit_on_sigterm, run

    service = Service(settings)
    exit_on_sigterm()
    try:
        service.start(lambda part: report(f"starting: {part}"))
        run(create_app(service), service)
    finally:
        service.stop()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    domain: Annotated[str | None, typer.Option("--domain", help="The domain of the prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    chain_length: Annotated[int | None, typer.Option(min=0, help="Fixed chain length; 0: no speculation.")] = None,
    drafter: Annotated[str | None, typer.Option(help="model, ngram or combined; without it, the service's.")] = None,
    verifier: Annotated[str | None, typer.Option(help="exact, or a relaxed one that the operator allows.")] = None,
    record: Annotated[bool, typer.Option(help="Let the service keep a trace for learning.")] = True,
    raw: Annotated[
        bool, typer.Option("--raw", help="Complete the prompt as it is, without the chat template.")
    ] = False,
    url: Url = None,
    token: Token = "",
    json_: Json = False,
) -> None:
    """Complete a prompt with the running service."""
    text = sys.stdin.read() if prompt == "-" else prompt
    body = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "speculation": {"chain_length": chain_length, "drafter": drafter, "verifier": verifier, "record": record},
    } | ({"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]})
    client = service_at(url, token)
    path = "/v1/completions" if raw else "/v1/chat/completions"
    said, last = _listen(client, path, domain, body, (lambda piece: None) if json_ else _say)
    if json_:
        print_json({"text": said, "usage": last.get("usage"), "speculation": last.get("speculation")})
        return
    _tell_steps(last)


@app.command()
def chat(
    domain: Annotated[str | None, typer.Option("--domain", help="The domain of the conversation.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="Sampling temperature; 0 is greedy.")] = 0.0,
    record: Annotated[bool, typer.Option(help="Let the service keep traces for learning.")] = True,
    url: Url = None,
    token: Token = "",
) -> None:
    """Talk with the running service: a line is a message, /reset forgets what was said, /exit or Ctrl-D ends."""
    client = service_at(url, token)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": line})
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "speculation": {"record": record},
        }
        try:
            said, last = _listen(client, "/v1/chat/completions", domain, body, _say)
        except UnreachableError:
            raise
        except AdaptiveSpecError as error:  # too long by now, say; what was said before stays
            messages.pop()
            typer.echo(f"Error: {error} /reset begins anew.", err=True)
            continue
        messages.append({"role": "assistant", "content": said})
        _tell_steps(last)


def _lines() -> Iterator[str]:
    """The lines that somebody types, or that come through a pipe, without the empty ones."""
    at_terminal = sys.stdin.isatty()
    if at_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # arrow keys and history
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _listen(
    client: Client, path: str, domain: str | None, body: dict[str, Any], say: Callable[[str], None]
) -> tuple[str, dict[str, Any]]:
    """Hand each piece of a streamed answer on; return all of it, and the last event, which has the usage."""
    pieces: list[str] = []
    last: dict[str, Any] = {}
    told = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "metadata": {"domain": domain} if domain else None,
    }
    for event in client.stream(path, body | told):
        for choice in event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            pieces.append(piece)
            say(piece)
        last = event
    return "".join(pieces), last


def _say(piece: str) -> None:
    typer.echo(piece, nl=False)


def _tell_steps(last: dict[str, Any]) -> None:
    typer.echo()
    if usage := last.get("usage"):
        steps = max(last["speculation"]["num_spec_steps"], 1)
        typer.echo(f"[{usage['completion_tokens']} tokens in {steps} steps]", err=True)
