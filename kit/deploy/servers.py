"""The programs that serve a model with OpenAI's API, on the loopback of a node: one class each."""

import json
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from typing_extensions import override

from kit import files
from kit.errors import KitError

LOOPBACK = "127.0.0.1"
ANSWER_TOKENS = 16
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM's --max-lora-rank takes


class Engine(StrEnum):
    """The program that serves."""

    VLLM = "vllm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True)
class Request:
    """What to serve: request.json. `adapter` is empty for a model that needs none; port 0 means any free one.

    `folder` has links to the files of the base and of the adapter, which together are what transformers serves.
    """

    engine: Engine
    python: str
    base: str
    adapter: str
    folder: str
    rank: int
    gpus: int
    port: int
    options: list[str]

    @classmethod
    def read(cls, path: Path) -> "Request":
        """The request of a job's folder."""
        found = files.read_json(path)
        return cls(**found | {"engine": Engine(found["engine"])})


def user_message(question: str) -> list[dict[str, str]]:
    """A conversation that is one question."""
    return [{"role": "user", "content": question}]


class Server(ABC):
    """A server and its API. `name` is the model's name in requests; `takes_key`: requests need the key."""

    takes_key = True

    def __init__(self, request: Request, port: int, key: str, name: str) -> None:
        self.request, self.port, self.key, self.name = request, port, key, name

    @classmethod
    @abstractmethod
    def create(cls, request: Request, port: int, key: str) -> "Server":
        """The server of a request."""

    @abstractmethod
    def command(self) -> list[str]:
        """The words that start it. The key is in the environment."""

    @abstractmethod
    def same_template(self, question: str, prompt: list[int]) -> bool:
        """Whether the server's chat template makes these ids of a question, as far as the API shows them."""

    @abstractmethod
    def logprob(self, prompt: list[int], answer: list[int]) -> float | None:
        """The mean log-probability of the answer's tokens, in nats; None where the API has none."""

    def answer(self, question: str) -> dict[str, Any]:
        """The API's response with a greedy answer."""
        body = {"model": self.name, "messages": user_message(question)}
        return self.post("/v1/chat/completions", body | {"max_tokens": ANSWER_TOKENS, "temperature": 0})

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The response to a request. Raises KitError with the server's message where it refuses."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"http://{LOOPBACK}:{self.port}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                return dict(json.load(response))
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")[:500]
            raise KitError(f"The server refused {path} with status {error.code}: {message}") from None

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/health", timeout=10) as response:
                return bool(response.status == 200)
        except OSError:
            return False


class Transformers(Server):
    """`transformers serve`. It takes no key, so every user of the node can ask it."""

    takes_key = False

    @classmethod
    @override
    def create(cls, request: Request, port: int, key: str) -> "Transformers":
        return cls(request, port, key, request.folder)

    @override
    def command(self) -> list[str]:
        program = str(Path(self.request.python).with_name("transformers"))
        return [
            program,
            "serve",
            "--host",
            LOOPBACK,
            "--port",
            str(self.port),
            *self.request.options,
            self.request.folder,
        ]

    @override
    def same_template(self, question: str, prompt: list[int]) -> bool:
        return bool(self.answer(question)["usage"]["prompt_tokens"] == len(prompt))  # the API has no ids

    @override
    def logprob(self, prompt: list[int], answer: list[int]) -> float | None:
        return None


class Vllm(Server):
    """vLLM's server. Where an adapter's names match nothing, it serves the base and reports no error (vllm#34186)."""

    @classmethod
    @override
    def create(cls, request: Request, port: int, key: str) -> "Vllm":
        return cls(request, port, key, "tuned" if request.adapter else "model")

    @override
    def command(self) -> list[str]:
        request = self.request
        words = [request.python, "-m", "vllm.entrypoints.openai.api_server", "--model", request.base]
        words += ["--host", LOOPBACK, "--port", str(self.port), "--served-model-name", "model"]
        if request.gpus > 1:
            words += ["--tensor-parallel-size", str(request.gpus)]
        if request.adapter:
            rank = next((rank for rank in LORA_RANKS if rank >= request.rank), request.rank)
            words += ["--enable-lora", "--lora-modules", f"tuned={request.adapter}", "--max-lora-rank", str(rank)]
        return words + request.options

    @override
    def same_template(self, question: str, prompt: list[int]) -> bool:
        body = {"model": self.name, "messages": user_message(question), "add_generation_prompt": True}
        return bool(self.post("/tokenize", body)["tokens"] == prompt)

    @override
    def logprob(self, prompt: list[int], answer: list[int]) -> float | None:
        body = {"model": self.name, "prompt": prompt + answer, "max_tokens": 1, "prompt_logprobs": 1}
        of_tokens = self.post("/v1/completions", body)["choices"][0]["prompt_logprobs"][len(prompt) :]
        found = [values[str(token)]["logprob"] for token, values in zip(answer, of_tokens, strict=True)]
        return float(sum(found) / len(found))


SERVERS: dict[Engine, type[Server]] = {Engine.VLLM: Vllm, Engine.TRANSFORMERS: Transformers}
