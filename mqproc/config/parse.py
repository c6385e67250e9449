"""Option parsing and option validation: values, flags, environment, files, combinations."""

from __future__ import annotations

import difflib
import enum
import functools
import grp
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from mqproc.config.options import FIELDS, PROFILES, Options, Profile, rocketmq_name
from mqproc.config.rocketmq_features import FEATURES, Feature
from mqproc.errors import ConfigurationError
from mqproc.util.units import PAGE_BYTES, delays_ms_of, parse_size

# RocketMQ's `broker.conf`: parsing, and detection of misspelt names.
#
# RocketMQ has many names that mqproc does not, so unknown names are ignored; one that almost equals an option's name is
# an error, since the option would silently keep its default.


STORE_NAMES: Final = ("storePathRootDir", "storePathCommitLog", "readOnlyCommitLogStorePaths")
"""Names that locate a store; they are not options."""
# RocketMQ's own, although similar to an option's name.
_ROCKETMQS: Final = frozenset({"brokerIP2"})
_COMMENTS: Final = ("#", "!")


@dataclass(frozen=True, slots=True)
class ConfLine:
    """`name=value`, and its line number, from 1."""

    number: int
    name: str
    value: str


def read_lines(path: Path) -> list[ConfLine]:
    """Read all assignments. Raises ConfigurationError for a line that is not NAME=VALUE."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return [_line(path, number, text) for number, text in _logical(lines)]


def _logical(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Join lines as Java's Properties do: a trailing backslash continues all but comments."""
    begun, text = 0, ""
    for number, line in enumerate(lines, 1):
        part = line.lstrip()
        if not text and (not part or part.startswith(_COMMENTS)):
            continue
        begun = begun if text else number
        text += part
        if (len(part) - len(part.rstrip("\\"))) % 2:
            text = text[:-1]
            continue
        yield begun, text.rstrip()
        text = ""
    if text:
        yield begun, text.rstrip()


def _line(path: Path, number: int, text: str) -> ConfLine:
    name, separator, value = text.partition("=")
    if not separator or not name.strip():
        raise ConfigurationError(f"{path}, line {number}: {text!r} is not NAME=VALUE")
    return ConfLine(number, name.strip(), value.strip())


def check_spelling(path: Path, lines: Iterable[ConfLine], known: Iterable[str]) -> list[str]:
    """Names in `lines` that are neither `known` nor similar to a known one.

    Raises ConfigurationError for names that differ from a known one by one letter, case or underscores.
    """
    plain = {_plain(name): name for name in (*known, *STORE_NAMES)}
    unknown = [line for line in lines if line.name not in plain.values()]
    errors = []
    for line in unknown:
        meant = next((plain[name] for name in plain if _is_near(_plain(line.name), name)), None)
        if meant is not None and line.name not in _ROCKETMQS:
            errors.append(f"{path}, line {line.number}: no option is called {line.name!r}; did you mean {meant}?")
    if errors:
        raise ConfigurationError("\n".join(errors))
    return list(dict.fromkeys(line.name for line in unknown))


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _is_near(one: str, other: str) -> bool:
    """Whether the names differ by one inserted, deleted, replaced or transposed letter."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
    one, other = one[same:], other[same:]
    return (
        one[1:] == other
        or one == other[1:]
        or one[1:] == other[1:]
        or (one[:2] == other[1::-1] and one[2:] == other[2:])
    )


ENVIRONMENT_PREFIX = "MQPROC_"
_OF_PROFILE: Final = {profile: f"profile {profile}" for profile in Profile}
_SOCKET_MODES: Final = ("0600", "0660", "0666")
_DEFAULTS: Final = frozenset({"default", *_OF_PROFILE.values()})
_NEAR_RATIO: Final = 0.8
# Further variables: location of store and file, faults that tests inject.
OTHER_VARIABLES = ("MQPROC_STORE", "MQPROC_CONFIG", "MQPROC_CRASH", "MQPROC_FAULT", "MQPROC_HANG")
_TYPES: dict[str, type] = {name: type(option.default) for name, option in FIELDS.items()}
T = TypeVar("T")
_BY_ROCKETMQ_NAME = {rocketmq_name(name): name for name in FIELDS}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its source.

    A source is `default`, `profile NAME`, a file's path, an environment variable, or `--set`.
    """

    value: Any
    source: str

    @property
    def is_explicit(self) -> bool:
        return self.source not in _DEFAULTS


def results_of(*calls: Callable[[], T]) -> list[T]:
    """Results of all calls. Raises one ConfigurationError with a line for each error."""
    found: list[T] = []
    errors: list[str] = []
    for call in calls:
        try:
            found.append(call())
        except ConfigurationError as error:
            errors += str(error).splitlines()
    if errors:
        # Two calls may read the same invalid file.
        raise ConfigurationError("\n".join(dict.fromkeys(errors)))
    return found


def _settings(values: Iterable[tuple[str, Any, str]]) -> dict[str, Setting]:
    """Parse (name, value, source) of options. Raises ConfigurationError for all that are wrong."""

    def parse(name: str, value: Any, source: str) -> tuple[str, Setting]:
        return name, Setting(parse_option(name, value, source), source)

    return dict(results_of(*(functools.partial(parse, *each) for each in values)))


def parse_saved(text: bytes, source: str) -> dict[str, Any]:
    """Options of a settings file by name, without unknown options of other versions.

    Raises ValueError, and ConfigurationError for an invalid value.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return {name: parse_option(name, value, source) for name, value in found.items() if name in FIELDS}


def parse_option(name: str, value: Any, source: str) -> Any:
    """Convert `value` (text, or a TOML value) to the option's type and check its bounds.

    Raises ConfigurationError naming option, value, allowed range and source.
    """
    if name not in FIELDS:
        near = difflib.get_close_matches(name, FIELDS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigurationError(f"{source}: no option is called {name!r}{hint}")
    return _in_bounds(name, _convert(name, value, source), source)


def _convert(name: str, value: Any, source: str) -> Any:
    kind = _TYPES[name]
    if kind is bool:
        return _as_bool(name, value, source)
    if kind is int:
        return _as_int(name, value, source)
    if issubclass(kind, enum.StrEnum):
        try:
            return kind(str(value))
        except ValueError:
            allowed = ", ".join(member.value for member in kind)
            raise ConfigurationError(f"{source}: {name} = {value!r} is not one of {allowed}") from None
    return str(value)


def _as_int(name: str, value: Any, source: str) -> int:
    """An integer; byte options also accept a size with unit."""
    if not isinstance(value, bool) and re.fullmatch(r"[+-]?\d[\d_]*", str(value).strip()):
        return int(value)
    if not isinstance(value, str) or FIELDS[name].metadata["unit"] != "bytes":
        raise ConfigurationError(f"{source}: {name} = {value!r} is not a whole number")
    try:
        return parse_size(value)
    except ValueError as error:
        raise ConfigurationError(f"{source}: {name}: {error}") from None


def _as_bool(name: str, value: Any, source: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    found = words.get(str(value).strip().lower())
    if found is None:
        raise ConfigurationError(f"{source}: {name} = {value!r} is neither true nor false")
    return found


def _in_bounds(name: str, value: Any, source: str) -> Any:
    low, high = FIELDS[name].metadata["low"], FIELDS[name].metadata["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        unit = FIELDS[name].metadata["unit"]
        least = f"from {low:,} " if low is not None else ""
        most = f"to {high:,} " if high is not None else ""
        raise ConfigurationError(f"{source}: {name} = {value:,} is out of range: {least}{most}{unit}".rstrip())
    return value


def read_toml(path: Path) -> dict[str, Setting]:
    """Read a TOML file: top level, or a table `[mqproc]`. Unknown names are errors."""
    return _settings((name, value, str(path)) for name, value in read_table(path).items() if name != "store")


def read_table(path: Path) -> dict[str, Any]:
    """The options of a TOML file: table `[mqproc]`, or top level. Raises ConfigurationError."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    table = found.get("mqproc", found)
    if not isinstance(table, dict):
        raise ConfigurationError(
            f"{path}: mqproc = {table!r} is not a table: options belong to [mqproc] or the top level"
        )
    if table is not found and (outside := found.keys() & {*FIELDS, "store"}):
        raise ConfigurationError(f"{path}: {min(outside)} is outside of [mqproc]: options belong to it, or to no table")
    return table


def read_broker_conf(path: Path) -> dict[str, Setting]:
    """Read the options of a RocketMQ `broker.conf`; other names are ignored unless misspelt."""
    lines = read_lines(path)
    pairs = {line.name: line.value for line in lines}
    known = [(name, value, str(path)) for key, value in pairs.items() if (name := _BY_ROCKETMQ_NAME.get(key))]
    results_of(
        lambda: check_spelling(path, lines, _BY_ROCKETMQ_NAME),
        lambda: _check_log_paths(pairs, path),
        lambda: _settings(known),
    )
    return _settings(known)


def ignored_names(config_file: Path | None) -> list[str]:
    """Names in a `broker.conf` that are not options of mqproc; a TOML file cannot have any."""
    if config_file is None or config_file.suffix == ".toml":
        return []
    return check_spelling(config_file, read_lines(config_file), _BY_ROCKETMQ_NAME)


def unsupported_options(config_file: Path | None) -> list[tuple[ConfLine, Feature]]:
    """Lines of a `broker.conf` for unsupported features; a name's last line counts."""
    if config_file is None or config_file.suffix == ".toml":
        return []
    last = {line.name: line for line in read_lines(config_file)}
    found = [(last[feature.option], feature) for feature in FEATURES if feature.option in last]
    on = [(line, feature) for line, feature in found if line.value.lower() not in feature.off]
    return sorted(on, key=lambda each: each[0].number)


def check_supported(config_file: Path | None, *, ignore: bool) -> None:
    """Raise ConfigurationError that names each unsupported option of a `broker.conf`.

    `ignore`: without those of `ignore_kvstore`.
    """
    texts = [
        f"{config_file}, line {line.number}: {line.name} = {line.value} is not supported: {feature.what}, which mqproc "
        f"does not read; {feature.effect}"
        for line, feature in unsupported_options(config_file)
        if not (ignore and feature.ignorable)
    ]
    if texts:
        raise ConfigurationError("\n".join(texts))


def _check_log_paths(pairs: Mapping[str, str], path: Path) -> None:
    """Reject other log folders: their segments would be taken for lost segments."""
    log = Path(pairs.get("storePathCommitLog") or "commitlog")
    root = Path(pairs.get("storePathRootDir") or log.parent)
    if log.name != "commitlog" or log.parent not in (root, Path()) or "," in str(log):
        raise ConfigurationError(f"{path}: storePathCommitLog = {log}: the log can only be {root / 'commitlog'}")
    if others := pairs.get("readOnlyCommitLogStorePaths"):
        raise ConfigurationError(f"{path}: readOnlyCommitLogStorePaths = {others}: the log can only be in one folder")


def read_environment(environment: Mapping[str, str]) -> dict[str, Setting]:
    """Read options given as MQPROC_<NAME>; see `environment_warnings` for others."""
    variables = {name: ENVIRONMENT_PREFIX + name.upper() for name in FIELDS}
    return _settings(
        (name, environment[variable], variable)
        for name, variable in variables.items()
        if variable in environment and not is_of_service(variable, environment)
    )


def is_of_service(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether Kubernetes set it, as MQPROC_METRICS_PORT=tcp://… for a service mqproc-metrics."""
    return variable.endswith("_PORT") and "://" in environment[variable]


def read_flags(flags: Iterable[str], source: str = "--set") -> dict[str, Setting]:
    """Parse options given as NAME=VALUE, by `--set` or another `source`."""

    def parse(flag: str) -> dict[str, Setting]:
        name, separator, value = flag.partition("=")
        if not separator:
            raise ConfigurationError(f"{source} {flag}: expected NAME=VALUE")
        name = _BY_ROCKETMQ_NAME.get(name.strip(), name.strip())
        return {name: Setting(parse_option(name, value, source), source)}

    found = results_of(*(functools.partial(parse, flag) for flag in flags))
    return {name: setting for each in found for name, setting in each.items()}


def load_settings(
    config_file: Path | None = None,
    flags: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    profile: Profile = Profile.SERVER,
) -> dict[str, Setting]:
    """All options with value and source; `profile` is the default of that option.

    Raises ConfigurationError for all that are wrong.
    """
    settings = {name: Setting(option.default, "default") for name, option in FIELDS.items()}
    settings["profile"] = Setting(profile, "default")

    def read_config() -> dict[str, Setting]:
        if config_file is None:
            return {}
        return read_toml(config_file) if config_file.suffix == ".toml" else read_broker_conf(config_file)

    for found in results_of(
        read_config,
        lambda: read_environment(os.environ if environment is None else environment),
        lambda: read_flags(flags),
    ):
        settings |= found
    return _with_profile(settings)


def _with_profile(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings with the sizes of their profile where no source sets them."""
    chosen = settings["profile"].value if "profile" in settings else Profile.SERVER
    sizes = PROFILES[chosen] if chosen is not Profile.SERVER else {}  # Those are the defaults.
    explicit = {name for name, setting in settings.items() if setting.is_explicit}
    return {
        **settings,
        **{name: Setting(value, _OF_PROFILE[chosen]) for name, value in sizes.items() if name not in explicit},
    }


def delete_hours(text: str) -> frozenset[int]:
    """Parse the hours of `delete_when`. Raises ConfigurationError."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if not parts or any(not re.fullmatch(r"[01]?[0-9]|2[0-3]", part) for part in parts):
        raise ConfigurationError(f"delete_when = {text!r} is out of range: hours from 0 to 23, separated by ';'")
    return frozenset(map(int, parts))


def cpu_numbers(text: str) -> frozenset[int]:
    """Parse a processor list such as "0,2-3". Raises ConfigurationError."""
    found: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        bounds = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part)
        first, last = (int(bounds[1]), int(bounds[2] or bounds[1])) if bounds else (1, 0)
        if first > last:
            raise ConfigurationError(f"writer_cpus = {text!r}: {part!r} is neither a processor number nor a range")
        found.update(range(first, last + 1))
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class SocketAccess:
    """Access to the sockets for clients: the owner alone, also members of a group, or all users."""

    mode: int = 0o600
    gid: int = -1


def socket_access(options: Options) -> SocketAccess:
    """The access by `socket_mode` and `socket_group`. Raises ConfigurationError."""
    group, mode = options.socket_group, options.socket_mode or ("0660" if options.socket_group else "0600")
    if mode not in _SOCKET_MODES:
        raise ConfigurationError(f"socket_mode = {mode!r} is not one of {', '.join(_SOCKET_MODES)}")
    if group and mode != "0660":
        raise ConfigurationError(f"socket_group = {group!r} has no effect with socket_mode = {mode!r}")
    try:
        gid = int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid if group else os.getegid()
    except (KeyError, ValueError):
        raise ConfigurationError(f"socket_group = {group!r}: there is no such group of users") from None
    return SocketAccess(int(mode, 8), gid)


def check_together(options: Options) -> None:
    """Check combinations of options. Raises ConfigurationError for all that are wrong."""
    results_of(
        lambda: _check_segment_size(options.mapped_file_size_commit_log),
        lambda: _check_broker_ip(options),
        lambda: _check_printable(options),
        lambda: _check_broker_name(options),
        lambda: delete_hours(options.delete_when),
        lambda: cpu_numbers(options.writer_cpus),
        lambda: delays_ms_of(options.message_delay_level),
        lambda: _check_frame_size(options),
        lambda: socket_access(options),
    )


def _check_segment_size(segment: int) -> None:
    if segment % PAGE_BYTES:
        bounds = FIELDS["mapped_file_size_commit_log"].metadata
        raise ConfigurationError(
            f"mapped_file_size_commit_log = {segment:,} is out of range: "
            f"from {bounds['low']:,} to {bounds['high']:,} bytes, in whole pages of {PAGE_BYTES:,}"
        )


def _check_broker_ip(options: Options) -> None:
    try:
        ipaddress.ip_address(options.broker_ip)
    except ValueError:
        raise ConfigurationError(
            f"broker_ip = {options.broker_ip!r} is not an IP address: records cannot hold names"
        ) from None


def _check_printable(options: Options) -> None:
    texts = {name: getattr(options, name) for name in ("broker_name", "metrics_host", "metrics_allowed_hosts")}
    # Such as bytes that are not UTF-8, which the environment may contain.
    if wrong := [f"{name} = {text!r} is not printable text" for name, text in texts.items() if not text.isprintable()]:
        raise ConfigurationError("\n".join(wrong))


def _check_broker_name(options: Options) -> None:
    if " " in options.broker_name:
        raise ConfigurationError(
            f"broker_name = {options.broker_name!r} contains a space: handles are separated by spaces"
        )


def _check_frame_size(options: Options) -> None:
    if options.max_pull_bytes > options.max_frame_bytes:
        raise ConfigurationError(
            f"max_pull_bytes = {options.max_pull_bytes:,} exceeds max_frame_bytes = {options.max_frame_bytes:,}"
        )


def options_from(settings: Mapping[str, Setting]) -> Options:
    """Build the options, checked together."""
    settings = _with_profile(settings)
    options = Options(**{name: setting.value for name, setting in settings.items()})
    try:
        check_together(options)
    except ConfigurationError as error:
        raise ConfigurationError("\n".join(_with_sources(line, settings) for line in str(error).split("\n"))) from None
    return options


def _with_sources(text: str, settings: Mapping[str, Setting]) -> str:
    named = set(re.findall(r"\w+", text)) & settings.keys()
    sources = sorted({settings[name].source for name in named} - {"default"})
    return f"{' and '.join(sources)}: {text}" if sources else text


def load_options(
    config_file: Path | None = None, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Options:
    """Read options from all sources, checked. Raises ConfigurationError."""
    return options_from(load_settings(config_file, flags, environment))


def environment_warnings(environment: Mapping[str, str]) -> list[str]:
    """Warnings about MQPROC_ variables that are not options, with the probable name.

    They are not errors: Kubernetes sets MQPROC_PORT and similar for a service of that name.
    """
    known = [name.upper() for name in FIELDS] + [name.removeprefix(ENVIRONMENT_PREFIX) for name in OTHER_VARIABLES]
    lines = []
    for variable in sorted(name for name in environment if name.startswith(ENVIRONMENT_PREFIX)):
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if is_of_service(variable, environment):
            lines.append(f"{variable} is set by Kubernetes for a service, and ignored")
        elif name not in known:
            near = difflib.get_close_matches(name, known, 1, _NEAR_RATIO)
            hint = f"; did you mean {ENVIRONMENT_PREFIX}{near[0]}?" if near else ""
            lines.append(f"{variable} is not an option, and ignored{hint}")
    return lines
