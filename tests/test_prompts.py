import random
import re

import pytest

from ddpo_pytorch import prompts


def drawn(function, count=300, **kwargs):
    random.seed(0)
    return [function(**kwargs) for _ in range(count)]


@pytest.mark.parametrize(
    "function, size, first, last",
    [
        # of 1,000 classes two are called "crane", the bird and the machine
        (prompts.imagenet_all, 999, "tench, Tinca tinca", "toilet tissue, toilet paper, bathroom tissue"),
        (prompts.imagenet_animals, 398, "tench, Tinca tinca", "puffer, pufferfish, blowfish, globefish"),
        (prompts.imagenet_dogs, 118, "Chihuahua", "Mexican hairless"),
        (prompts.simple_animals, 45, "cat", "kangaroo"),
    ],
)
def test_shipped_lists_are_drawn_whole(function, size, first, last):
    seen = {prompt for prompt, metadata in drawn(function, count=20 * size) if metadata == {}}
    assert len(seen) == size and {first, last} <= seen


def test_a_file_of_ones_own_is_read_as_utf8_without_blank_lines(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_bytes("\ufeffein Bär\r\n\n  un éléphant  \n\n猫\n".encode())
    assert {prompt for prompt, _ in drawn(prompts.from_file, path=str(file))} == {"ein Bär", "un éléphant", "猫"}
    assert {prompt for prompt, _ in drawn(prompts.from_file, path=str(file), low=1, high=2)} == {"un éléphant"}


def test_held_out_lists_have_nothing_that_is_trained_on():
    animals = {prompt.lower() for prompt, _ in drawn(prompts.imagenet_animals, count=9000)}
    animals |= {prompt for prompt, _ in drawn(prompts.simple_animals, count=900)}
    unseen, objects = (prompts._load_lines(f"{name}.txt") for name in ("unseen_animals", "everyday_objects"))
    assert len(set(unseen)) == len(unseen) == len(set(objects)) == len(objects) == 20
    assert not animals & {*unseen, *objects}


def test_a_prompt_set_is_a_file_or_a_part_of_it_or_what_training_draws():
    def parse(spec, limit=8):
        return prompts.parse_prompt_set(spec, lambda: prompts.from_file("simple_animals.txt", 0, 3), limit)

    whole = parse("simple_animals.txt")
    assert (whole.name, len(whole.prompts), whole.prompts[0]) == ("simple_animals", 8, "cat")
    assert whole.metadata == ({},) * 8
    assert parse("some=simple_animals.txt[40:42]") == prompts.PromptSet("some", ("camel", "bat"), ({}, {}))
    assert parse("simple_animals.txt[-2:]").prompts == ("hedgehog", "kangaroo")
    random.seed(7)
    state = random.getstate()
    trained = parse("train")
    assert (trained.name, set(trained.prompts)) == ("train", {"cat", "dog", "horse"}) and random.getstate() == state
    assert parse("train") == trained and len(parse("train", 2).prompts) == 2
    wrong = {
        "no.txt": "no prompt file",
        "simple_animals.txt[99:]": "which has 45",
        "a/b=simple_animals.txt": "no name",
        "": "a prompt set is",
    }
    for spec, says in wrong.items():
        with pytest.raises(ValueError, match=says):
            parse(spec)


def test_prompts_can_be_a_file_or_a_list_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").write_text("a cat, asleep\na dog\n")
    assert prompts.parse_prompts("own").prompts == ("a cat, asleep", "a dog")
    assert prompts.parse_prompts("everyday_objects.txt[1:3]").prompts == ("teapot", "bicycle")
    assert prompts.parse_prompts("a cat, a dog,").prompts == ("a cat", "a dog")
    assert len(prompts.parse_prompts(", ".join(["a cat with a long tail"] * 400)).prompts) == 400
    assert prompts.parse_prompts("['a cat, asleep', 'a dog']").prompts == ("a cat, asleep", "a dog")


def test_ones_own_file_comes_before_a_shipped_list_of_that_name(tmp_path, monkeypatch):
    (tmp_path / "activities.txt").write_text("sleeping\n")
    monkeypatch.chdir(tmp_path)
    prompts._load_lines.cache_clear()
    assert drawn(prompts.from_file, count=1, path="activities.txt") == [("sleeping", {})]
    prompts._load_lines.cache_clear()


def test_bad_files_are_refused_with_their_name(tmp_path):
    with pytest.raises(ValueError, match=r'"no.txt".*simple_animals\.txt'):
        prompts.from_file("no.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no prompts"):
        prompts.from_file(str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes("Bär".encode("latin-1"))
    with pytest.raises(ValueError, match="not UTF-8"):
        prompts.from_file(str(tmp_path / "latin.txt"))
    with pytest.raises(ValueError, match="lines 50 to 60.*45 lines"):
        prompts.from_file("simple_animals.txt", 50, 60)


def test_nouns_do_activities_with_the_right_article():
    seen = {
        p
        for p, _ in drawn(
            prompts.nouns_activities, 2000, nouns_file="simple_animals.txt", activities_file="activities.txt"
        )
    }
    assert len(seen) == 135
    assert {"an ant riding a bike", "a cat playing chess", "a horse washing the dishes"} <= seen


def test_counting_asks_what_it_prompted():
    for prompt, metadata in drawn(prompts.counting, nouns_file="simple_animals.txt", low=1, high=3):
        number, noun = metadata["answers"]
        assert number in ("one", "two", "three")
        plural = re.fullmatch(r"How many (.+) are there in this image\?", metadata["questions"][0])[1]
        assert metadata["questions"][1] == "What animal is in this image?"
        assert prompt == (f"one {noun}" if number == "one" else f"{number} {plural}")
    assert any(
        m["answers"][1] == "mouse" and "mice" in m["questions"][0]
        for _, m in drawn(prompts.counting, nouns_file="simple_animals.txt", low=1, high=3)
    )
    with pytest.raises(ValueError, match="low 5 and high 2"):
        prompts.counting("simple_animals.txt", 5, 2)
