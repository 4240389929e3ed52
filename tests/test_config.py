"""Where settings come from, who wins, and what a wrong one says."""

import dataclasses

import pytest

from nanofw.component import KINDS
from nanofw.config import Config, merge_options, parse_bytes, parse_option, read_environment
from nanofw.errors import ConfigError


@pytest.fixture
def resolve(tmp_path):
    """`Config.resolve` in a directory of its own: `resolve(given, environ, nanofw=..., pyproject=...)`."""

    def run(given=None, environ=None, file=None, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.toml").write_text(text)
        return Config.resolve(given or {}, file=file, directory=tmp_path, environ=environ or {})

    return run


def test_nothing_set_is_the_defaults(resolve):
    assert resolve() == Config()


def test_precedence(resolve):
    """Command line > environment > file > defaults, each setting on its own."""
    config = resolve(
        {"runner": "line"},
        {"NANOFW_RUNNER": "environment", "NANOFW_SCHEDULER": "environment"},
        nanofw='runner = "file"\nscheduler = "file"\nattention = "file"\n',
    )
    assert (config.runner, config.scheduler, config.attention) == ("line", "environment", "file")
    assert config.sampler == Config().sampler


def test_one_file_is_read(resolve):
    """nanofw.toml, else [tool.nanofw]; a table of another tool is nobody's business here."""
    project = '[tool.nanofw]\nmodel = "project"\nseed = 3\n[tool.other]\nmodel = "other"\n'
    assert resolve(pyproject=project) == Config(model="project", seed=3)
    assert resolve(pyproject=project, nanofw='model = "own"') == Config(model="own")


def test_pyproject_without_a_table(resolve):
    assert resolve(pyproject='[project]\nname = "x"\n') == Config()


def test_a_file_chosen_by_name_replaces_the_others(resolve, tmp_path):
    chosen = tmp_path / "chosen.toml"
    chosen.write_text('model = "chosen"')
    assert resolve(file=chosen, nanofw='model = "own"\nseed = 3') == Config(model="chosen")
    assert resolve(environ={"NANOFW_CONFIG": str(chosen)}) == Config(model="chosen")
    other = tmp_path / "pyproject.toml"
    other.write_text('[tool.nanofw]\nmodel = "project"')
    assert resolve(file=other, environ={"NANOFW_CONFIG": str(chosen)}) == Config(model="project")


def test_file_and_environment_are_read_as_typed(resolve):
    config = resolve(
        environ={
            "NANOFW_MAX_NUM_SEQS": "7",
            "NANOFW_STRICT": "yes",
            "NANOFW_STEPS_IN_FLIGHT": "1",
            "NANOFW_DISABLE": "a, b",
            "NANOFW_PLUGINS": "basics",
            "NANOFW_SEED": "",
            "NANOFW_CACHE": "/anywhere",
            "OTHER_VARIABLE": "x",
        },
        nanofw='dtype = "float16"\nmax_batch_tokens = 64\nkv_memory = "1GiB"\nseed = 4\n',
    )
    expected = Config(
        max_num_seqs=7,
        strict=True,
        steps_in_flight=1,
        disable=("a", "b"),
        plugins=("basics",),
        dtype="float16",
        max_batch_tokens=64,
        kv_memory="1GiB",
        seed=4,
    )
    assert config == expected


def test_options_are_merged_key_by_key(resolve):
    config = resolve(
        {"options": {"kv_cache": {"block_size": "8"}}},
        nanofw="[options.kv_cache]\nblock_size = 32\nother = 1\n[options.runner]\nx = 2\n",
    )
    assert config.options == {"kv_cache": {"block_size": "8", "other": 1}, "runner": {"x": 2}}


@pytest.mark.parametrize("later", [{"kv_blocks": 5}, {"kv_memory": "1GiB"}])
@pytest.mark.parametrize("file", ['kv_memory = "2GiB"', "kv_blocks = 9"])
def test_the_size_of_the_cache_is_one_setting(resolve, file, later):
    """A size on the command line replaces the file's, in whatever unit either is given."""
    assert resolve(later, nanofw=file) == Config(**later)
    assert resolve(nanofw=file).replace(**later) == Config(**later)
    with pytest.raises(ConfigError, match="both set the size of the KV cache: give one of them"):
        resolve({"kv_blocks": 5, "kv_memory": "1GiB"})


WRONG = {
    "unknown": (
        'atention = "x"',
        r"no setting 'atention' \(did you mean 'attention'\?\); settings are model, model_im",
    ),
    "no-idea": ("qqq = 1", "no setting 'qqq'; settings are model,"),
    "type": ('max_num_seqs = "many"', "setting 'max_num_seqs' must be an integer, got 'many'"),
    "bool-for-int": ("max_num_seqs = true", "setting 'max_num_seqs' must be an integer, got True"),
    "fraction": ("max_num_seqs = 1.5", "setting 'max_num_seqs' must be an integer, got 1.5"),
    "optional": ('kv_blocks = "x"', "setting 'kv_blocks' must be an integer or none, got 'x'"),
    "choice": ('dtype = "int8"', "setting 'dtype' must be one of 'auto', 'float32', 'float16', 'bfloat16', got 'int8'"),
    "depth": ("steps_in_flight = 2", "setting 'steps_in_flight' must be one of 0, 1, got 2"),
    "flag": ('strict = "maybe"', "setting 'strict' must be true or false, got 'maybe'"),
    "zero": ("kv_blocks = 0", "kv_blocks must be at least 1, got 0"),
    "negative": ("max_model_len = -1", "max_model_len must be at least 1, got -1"),
    "memory": ('kv_memory = "lots"', "'lots' is no amount of memory; write e.g. 512MiB or 2GiB"),
    "kind": ("[options.kvcache]\nx = 1", r"options.kvcache: no such kind of plugin \(did you mean 'kv_cache'\?\)"),
    "options": ("options = 3", "'options' must be tables of options by kind, got an integer 3"),
    "toml": ("model = ", "is not valid TOML"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(resolve, case):
    """The file is named, and the first thing that is wrong in it."""
    text, message = WRONG[case]
    with pytest.raises(ConfigError, match=rf"nanofw\.toml\b.*{message}"):
        resolve(nanofw=text)


def test_a_wrong_table_in_pyproject(resolve):
    with pytest.raises(ConfigError, match=r"pyproject\.toml: no setting 'atention'"):
        resolve(pyproject="[tool.nanofw]\natention = 'x'")


def test_a_missing_file(resolve, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read config file .*nosuch\.toml: No such file"):
        resolve(file=tmp_path / "nosuch.toml")


def test_wrong_variables(resolve):
    with pytest.raises(ConfigError, match=r"no variable NANOFW_ATENTION \(did you mean 'NANOFW_ATTENTION'\?\)"):
        resolve(environ={"NANOFW_ATENTION": "x"})
    with pytest.raises(ConfigError, match="setting 'max_num_seqs' must be an integer, got 'many'"):
        resolve(environ={"NANOFW_MAX_NUM_SEQS": "many"})


def test_every_setting_has_a_variable():
    """All fields but `options`, whose keys are the plugins' own."""
    texts = {"steps_in_flight": "1", "dtype": "float16", "kv_memory": "1GiB"}
    hints = {f.name: f.type for f in dataclasses.fields(Config)}
    for name, hint in hints.items():
        if name == "options":
            continue
        text = texts.get(name) or ("7" if "int" in hint else "true" if hint == "bool" else "some")
        found = Config.build(read_environment({f"NANOFW_{name.upper()}": text}))
        assert getattr(found, name) != getattr(Config(), name), name


def test_unset_leaves_what_is_below(resolve):
    """The command line passes None for an option that was not given."""
    assert resolve({"model": None, "strict": None}, nanofw='model = "file"\nstrict = true').model == "file"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kv_cache.block_size=32", {"kv_cache": {"block_size": "32"}}),
        ("runner.buckets=1,2,4", {"runner": {"buckets": "1,2,4"}}),
        ("model.x=", {"model": {"x": ""}}),
        ("model.x=a=b", {"model": {"x": "a=b"}}),
    ],
)
def test_option_texts(text, expected):
    assert parse_option(text) == expected
    assert set(expected) <= set(KINDS)


@pytest.mark.parametrize("text", ["", "block_size=32", "kv_cache.block_size", "a.b.c=1", "=3"])
def test_option_texts_of_another_form(text):
    with pytest.raises(ConfigError, match=r"an option has the form KIND\.KEY=VALUE, e\.g\. kv_cache\.block_size=32"):
        parse_option(text)


def test_the_last_of_several_options_wins():
    texts = ["kv_cache.a=1", "runner.b=2", "kv_cache.a=3", "kv_cache.c=4"]
    assert merge_options(texts) == {"kv_cache": {"a": "3", "c": "4"}, "runner": {"b": "2"}}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("1B", 1),
        ("1k", 1024),
        ("1 KiB", 1024),
        ("1kB", 1000),
        ("512MiB", 512 << 20),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2 * 10**9),
        ("1T", 1 << 40),
    ],
)
def test_amounts_of_memory(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "1.GiB", "1 giga", "1e9", "0.0GiB", "nan"])
def test_no_amount_of_memory(text):
    with pytest.raises(ConfigError, match="is no amount of memory"):
        parse_bytes(text)


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model = "other"
    assert Config(model="a").replace(seed=1) == Config(model="a", seed=1)
    with pytest.raises(ConfigError, match="kv_blocks must be at least 1"):
        Config().replace(kv_blocks=0)
