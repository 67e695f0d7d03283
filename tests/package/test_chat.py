"""A conversation in a terminal: its cache, its end, its characters, what it is told."""

import html
import json
import re
import runpy
import sys

import pytest
import torch

from drawn import ROOT
from test_gguf import MODEL

RECORDED = ROOT / "book" / "_static" / "chat.html"
CHAT = runpy.run_path(str(ROOT / "examples" / "chat.py"))
REAL = pytest.mark.costly("real/chat", "examples/chat.py")
QUESTIONS = "Give me three names for a cat.", "Which one is best?"


def recorded():
    """The conversation that the home page shows, as it is marked up there."""
    return re.search(r"<pre>.*?</pre>", RECORDED.read_text("utf-8"), re.DOTALL)[0]


@pytest.fixture(scope="module")
def talk():
    return CHAT["Conversation"](MODEL, 512)


@pytest.fixture
def fresh(talk, monkeypatch):
    """The conversation from the start, and how many tokens its model has read."""
    talk.messages, talk.text, read = [], [], []
    forward = talk.model.forward

    def counting(ids, **given):
        read.append(len(ids))
        return forward(ids, **given)

    monkeypatch.setattr(talk.model, "forward", counting)
    return talk, read


@pytest.fixture
def scripted(monkeypatch):
    """Has these tokens drawn one after the other, whatever the logits."""

    def write(ids):
        left = iter(ids)
        draw = lambda *given: torch.tensor([next(left)])  # noqa: E731
        monkeypatch.setattr("attnlib.generation.sample", draw)

    return write


@REAL
def test_each_token_is_read_once(fresh):
    """A second answer reads what is new, and is what it is without the first's cache."""
    talk, read = fresh
    first = "".join(talk.answer(QUESTIONS[0], 20, temperature=0.0))
    assert "Luna" in first and len(read) == 20
    second = "".join(talk.answer(QUESTIONS[1], 8, temperature=0.0))
    assert sum(read[20:]) < 40
    talk.messages, talk.text = talk.messages[:2], []
    assert "".join(talk.answer(QUESTIONS[1], 8, temperature=0.0)) == second
    assert sum(read[28:]) > 60


@REAL
def test_an_answer_ends_with_its_turn_and_has_whole_characters(fresh, scripted):
    talk, _ = fresh
    ids = talk.tokenizer.encode("naïve 🦜!").ids
    scripted([*ids, talk.end, 5])
    pieces = list(talk.answer("Hi", 50))
    assert len(pieces) < len(ids)  # a parrot is several tokens
    assert "".join(pieces) == "naïve 🦜!" == talk.messages[-1]["content"]
    assert not any("\ufffd" in piece for piece in pieces)


@REAL
def test_an_answer_that_is_broken_off_stays_in_mind(fresh, scripted):
    talk, _ = fresh
    scripted(talk.tokenizer.encode("one two three").ids)
    answer = talk.answer("Hi", 50)
    assert next(answer) == "one"
    answer.close()
    scripted([talk.end])
    list(talk.answer("Go on", 1))
    assert [m["content"] for m in talk.messages] == ["Hi", "one", "Go on", ""]


@REAL
def test_no_room_is_told(fresh):
    talk, _ = fresh
    with pytest.raises(ValueError, match="no room: these are more than 512 tokens"):
        list(talk.answer("word " * 600, 5))


@REAL
def test_what_a_template_refuses_is_told_in_a_sentence(monkeypatch, capsys, fresh):
    talk, _ = fresh
    refusing = "{{ raise_exception('roles must alternate') }}"
    template = talk.template.environment.from_string(refusing)
    monkeypatch.setattr(talk, "template", template)
    monkeypatch.setitem(CHAT["main"].__globals__, "Conversation", lambda path, room: talk)
    assert run(monkeypatch, capsys, ["Hi", ""]) == "roles must alternate"


def run(monkeypatch, capsys, words, *given):
    """What stands in the terminal, or the sentence that the program ends with."""
    left = iter(words)

    def ask(prompt):
        word = next(left)
        print(prompt + word)
        return word

    monkeypatch.setattr(sys, "argv", ["chat.py", *map(str, given)])
    monkeypatch.setitem(CHAT["main"].__globals__, "input", ask)
    try:
        CHAT["main"]()
    except SystemExit as error:
        return error.code
    return capsys.readouterr().out


@REAL
def test_the_program(monkeypatch, capsys, talk):
    monkeypatch.setitem(CHAT["main"].__globals__, "Conversation", lambda path, room: talk)
    talk.messages, talk.text = [], []
    given = "--temperature", "0", "--length", "20"
    assert "Luna" in run(monkeypatch, capsys, [QUESTIONS[0], ""], *given)


@pytest.mark.costly("real/chat", "examples/chat.py", recorded)
def test_the_conversation_of_the_home_page_is_what_the_program_prints(
    monkeypatch, capsys, talk
):
    """Each token, too; the likeliest one leads there by more than 0.13, in the logits."""
    markup, lengths, answer = recorded(), [], talk.answer
    command, shown = html.unescape(re.sub(r"<.*?>", "", markup)).split("\n", 1)
    questions = re.findall(r"<kbd>(.*?)</kbd>", markup)

    def noted(*args, **given):
        lengths.append([])
        for words in answer(*args, **given):
            lengths[-1].append(len(words))
            yield words

    monkeypatch.setattr(talk, "answer", noted)
    monkeypatch.setitem(CHAT["main"].__globals__, "Conversation", lambda path, room: talk)
    talk.messages, talk.text = [], []
    assert len(questions) == 3 and "examples/chat.py" in command
    printed = run(monkeypatch, capsys, [*questions, ""], *command.split()[2:])
    assert printed == f"{shown}\n\n> \n"
    assert [json.loads(found) for found in re.findall(r'"(\[.*?\])"', markup)] == lengths


def test_what_cannot_be_talked_to_is_told_in_a_sentence(monkeypatch, capsys, tmp_path):
    said = run(monkeypatch, capsys, [], tmp_path / "none.gguf")
    assert "none.gguf" in said and "\n" not in said
    monkeypatch.setitem(CHAT["main"].__globals__, "chat_words", lambda path: (None, 2))
    assert "no chat template" in run(monkeypatch, capsys, [], MODEL)
    monkeypatch.setitem(CHAT["main"].__globals__, "find_spec", lambda name: None)
    assert "SmolLM2 is not installed" in run(monkeypatch, capsys, [])
