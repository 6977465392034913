"""Rank 0's side of the rendezvous: one thread that serves all ranks until they are complete."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import selectors
import time
from collections import Counter
from typing import Any

from slurm_pt.errors import LaunchError, RunFolderError, SlurmPtError
from slurm_pt.files import find_json, write_json
from slurm_pt.launch import wire
from slurm_pt.launch.environment import show_ranks
from slurm_pt.launch.hello import Hello, find_disagreement, parse_hello
from slurm_pt.launch.meeting import (
    Agree,
    Meeting,
    MeetingStoppedError,
    RankLostError,
    Terms,
    kind_of,
    process_mark,
)
from slurm_pt.launch.network import (
    choose_interface,
    is_loopback,
    list_interfaces,
    order_by_use,
    plain_address,
)
from slurm_pt.launch.wire import Channel, ConnectionEndedError, Message, UnprovenError

_SLICE_S = 0.1
_LOOK_S = 1.0
"""Seconds between two looks at the folder."""
_UNPROVEN_S = 20.0
"""How long a connection may stay without a proof."""
_LINGER_S = 5.0
"""How long rank 0 stays after a refusal, to tell the ranks that are still on their way."""
_FLUSH_S = 30.0


class Host:
    """The meeting as rank 0 holds it."""

    def __init__(self, terms: Terms, hello: Hello):
        self.terms = terms
        self.nonce = secrets.token_hex(16)
        self.listener = wire.listen()
        self.listener.setblocking(False)
        self.store = wire.listen()
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.hellos = {0: hello}
        self.channels: dict[int, Channel] = {}
        self.open: set[Channel] = set()
        self.dropped: Counter[str] = Counter()
        self.notes: dict[int, str] = {}
        self.is_published = False
        self.farewell: Message | None = None
        self.told: set[int] = set()

    def meet(self, agree: Agree) -> Meeting:
        """The complete meeting; an error is told to all ranks before it is raised."""
        try:
            self._refuse_second_host()
            self._write_file("waiting")
            _allow_files(self.terms.info.world_size + 128)
            self._gather()
            return self._conclude(agree)
        except BaseException as error:
            text = str(error) if isinstance(error, LaunchError | MeetingStoppedError) else ""
            self._dismiss(kind_of(error), text or f"rank 0 failed: {error!r}")
            raise
        finally:
            self.selector.close()
            self.listener.close()

    # -------------------------------------------------------------------------- the file

    def _write_file(self, state: str, text: str = "") -> None:
        info, hello = self.terms.info, self.hellos[0]
        record = {
            "state": state,
            "text": text,
            "time": time.time(),
            "nonce": self.nonce,
            "addresses": self._addresses(),
            "port": self.listener.getsockname()[1],
            "host": hello.host,
            "machine": hello.machine,
            "pid": hello.pid,
            "process_mark": process_mark(hello.pid),
            "world_size": info.world_size,
            "job_key": info.job_key,
            "step_id": info.step_id,
            "restart_count": info.restart_count,
        }
        write_json(self.terms.file, record, mode=0o600)
        self.is_published = True

    def _addresses(self) -> list[str]:
        wanted = (self.terms.interface or "").split(",")
        interfaces = order_by_use(list_interfaces())
        interfaces.sort(key=lambda one: one.name not in wanted)
        return [address for one in interfaces for address in one.addresses]

    def _refuse_second_host(self) -> None:
        """Refuses to be rank 0 next to a living one of the same start."""
        with contextlib.suppress(RunFolderError):
            old = find_json(self.terms.file) or {}
            if old.get("machine") != self.hellos[0].machine or old["pid"] == os.getpid():
                return
            alive = process_mark(old["pid"]) == old["process_mark"] is not None
            if alive and old["state"] in ("waiting", "complete"):
                raise LaunchError(self._two_hosts(old))

    def _two_hosts(self, other: dict[str, Any]) -> str:
        return (
            f"two processes claim rank 0: process {other['pid']} on {other['host']} and "
            f"{self.hellos[0].pid} on {self.hellos[0].host}. The launcher must start each rank "
            f"once. To fix: start one process per task (no loop or spawn inside a task)."
        )

    def _look_at_folder(self) -> None:
        """Notices another rank 0, and ranks that run but cannot reach this one."""
        terms = self.terms
        try:
            now = find_json(terms.file)
        except RunFolderError:
            return
        if now is None:
            self._write_file("waiting")
        elif now["nonce"] != self.nonce:
            raise LaunchError(self._two_hosts(now))
        prefix = terms.note_file(0).name.removesuffix("0.json")
        for name in os.listdir(terms.folder):  # noqa: PTH208 -- a thousand names, once a second
            if not name.startswith(prefix):
                continue
            with contextlib.suppress(RunFolderError):
                self._read_note(find_json(terms.folder / name))

    def _read_note(self, note: dict[str, Any] | None) -> None:
        if note is not None and note["nonce"] == self.nonce and note["rank"] not in self.hellos:
            self.notes[note["rank"]] = note["text"]
            if note["is_final"]:
                raise LaunchError(note["text"])

    # ------------------------------------------------------------------------ waiting

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.terms.info.world_size) if rank not in self.hellos]

    def _gather(self) -> None:
        """Serves until every rank has said who it is."""
        if self.hellos[0].problem is not None:
            raise LaunchError(f"{self.hellos[0].who}: {self.hellos[0].problem}")
        next_look = 0.0
        next_report = self.terms.started_mono + self.terms.report_s
        while missing := self._missing():
            self.terms.check()
            self._serve()
            now = time.monotonic()
            if now >= next_look:
                self._look_at_folder()
                next_look = now + _LOOK_S
            if now >= self.terms.deadline:
                raise RankLostError(self._who_is_missing(missing))
            if now >= next_report:
                self.terms.log(self._who_is_missing(missing))
                next_report += self.terms.report_s

    def _who_is_missing(self, missing: list[int]) -> str:
        waited = time.monotonic() - self.terms.started_mono
        text = (
            f"{len(missing)} of {self.terms.info.world_size} ranks are missing after "
            f"{waited:.0f} s of cluster.start_timeout_s={self.terms.timeout_s:g}: "
            f"{show_ranks(self.terms.info, missing)}"
        )
        for rank in [rank for rank in missing if rank in self.notes][:8]:
            text += f". {self.notes[rank]}"
        if self.dropped:
            dropped = ", ".join(f"{count} because {why}" for why, count in self.dropped.items())
            text += f". Connections that were no rank of this start: {dropped}"
        return text + (
            ". To fix: look at those ranks' logs and nodes; raise cluster.start_timeout_s if they "
            "only start slowly."
        )

    def _serve(self, limit_s: float = _SLICE_S) -> None:
        for key, _ in self.selector.select(limit_s):
            if isinstance(key.fileobj, Channel):
                self._read(key.fileobj)
            else:
                self._accept()
        old = time.monotonic() - _UNPROVEN_S
        for channel in [one for one in self.open if not one.is_proven and one.born < old]:
            self._drop(channel, "they said nothing")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError as error:  # out of file descriptors: make room, or give up
                strangers = [one for one in self.open if not one.is_proven]
                if not strangers:
                    raise LaunchError(
                        f"rank 0 cannot accept a connection ({error.strerror}) with "
                        f"{len(self.channels)} ranks connected. To fix: raise `ulimit -n` in "
                        f"slurm.setup."
                    ) from error
                self._drop(min(strangers, key=lambda one: one.born), "room was needed")
                return
            channel = Channel(connection, self.nonce)
            self.open.add(channel)
            self.selector.register(channel, selectors.EVENT_READ)
            with contextlib.suppress(ConnectionEndedError):
                channel.greet()

    def _drop(self, channel: Channel, why: str | None) -> None:
        if why is not None:
            self.dropped[why] += 1
        self.open.discard(channel)
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(channel)
        channel.close()

    def _read(self, channel: Channel) -> None:
        if channel not in self.open:  # dropped a moment ago
            return
        try:
            while (message := channel.receive()) is not None:
                self._handle(channel, message)
        except UnprovenError as error:
            self._drop(channel, str(error))
        except ConnectionEndedError as error:
            self._drop(channel, None if channel.is_proven else "they left without a word")
            rank = channel.peer
            if rank is not None and self.channels.get(rank) is channel and not self.farewell:
                raise RankLostError(
                    f"{self.hellos[rank].who} left while the ranks were coming together "
                    f"({error}). To fix: look at its log and at its node."
                ) from error

    def _handle(self, channel: Channel, message: Message) -> None:
        if message.get("kind") == "stopped":
            if not self.farewell:
                raise MeetingStoppedError(str(message.get("text")))
            return
        try:
            hello = parse_hello(message["hello"])
        except (KeyError, TypeError, ValueError) as error:
            raise LaunchError(
                f"a rank of this start sent what is no Hello ({error}). All ranks must run the "
                f"same slurm_pt. To fix: use one environment that all nodes share."
            ) from error
        if self.farewell:
            self._tell(channel, self.farewell)
            self.told.add(hello.rank)
        else:
            self._register(channel, hello)

    def _register(self, channel: Channel, hello: Hello) -> None:
        earlier = self.channels.get(hello.rank)
        known = self.hellos.get(hello.rank)
        again = known is not None and (known.machine, known.pid) == (hello.machine, hello.pid)
        if earlier is not None and again:  # it gave up on a connection and made a new one
            self._drop(earlier, None)
        else:
            problem = find_disagreement(self.hellos, hello)
            if problem is not None:
                self.told.add(hello.rank)  # by the farewell that follows
                raise LaunchError(problem)
        channel.peer = hello.rank
        self.hellos[hello.rank] = hello
        self.channels[hello.rank] = channel
        channel.send({"kind": "welcome"})

    # ------------------------------------------------------------------------ the end

    def _conclude(self, agree: Agree) -> Meeting:
        """All are there: decide, and tell everybody."""
        info, terms = self.terms.info, self.terms
        ways = [plain_address(one.connection.getsockname()[0]) for one in self.channels.values()]
        outside = Counter(address for address in ways if not is_loopback(address))
        source = outside.most_common(1)[0][0] if outside else None
        chosen = choose_interface(
            list_interfaces(),
            wanted=terms.interface,
            several_machines=bool(outside),
            source=source,
        )
        address = source or (*chosen.addresses, "127.0.0.1")[0]
        hellos = tuple(self.hellos[rank] for rank in range(info.world_size))
        try:
            agreed = dict(agree(hellos))
        except SlurmPtError as error:
            raise LaunchError(str(error)) from error
        meeting = Meeting(
            address=address,
            port=self.store.getsockname()[1],
            interface=chosen.name,
            several_machines=bool(outside),
            hellos=hellos,
            hosts=tuple(hello.host for hello in hellos),
            agreed=agreed,
            store_socket=self.store,
        )
        self._tell_agreement(meeting)
        meeting.control = {rank: one.connection for rank, one in self.channels.items()}
        self._finish(meeting)
        return meeting

    def _tell_agreement(self, meeting: Meeting) -> None:
        message: Message = {
            "kind": "agreement",
            "address": meeting.address,
            "port": meeting.port,
            "several_machines": meeting.several_machines,
            "hosts": list(meeting.hosts),
            "agreed": meeting.agreed,
        }
        for rank, channel in self.channels.items():
            try:
                channel.send(message)
            except ConnectionEndedError as error:
                raise RankLostError(
                    f"{self.hellos[rank].who} left as the last ranks came ({error}). To fix: look "
                    f"at its log and at its node."
                ) from error
        self._flush(_FLUSH_S)

    def _finish(self, meeting: Meeting) -> None:
        """Tidies up after a complete meeting."""
        for channel in self.open - set(self.channels.values()):
            channel.close()
        self._write_file("complete", f"all {self.terms.info.world_size} ranks were there")
        for rank in self.notes:
            self.terms.note_file(rank).unlink(missing_ok=True)
        sizes = sorted({hello.affinity_cpus for hello in meeting.hellos})
        self.terms.log(
            f"all ranks are there: world_size={self.terms.info.world_size} "
            f"seconds={time.monotonic() - self.terms.started_mono:.1f} rank0={meeting.address} "
            f"interface={meeting.interface} several_machines={meeting.several_machines} "
            f"cpus_per_rank={'-'.join(str(size) for size in sizes)} "
            f"dropped_connections={self.dropped.total()}"
        )

    def _dismiss(self, kind: str, text: str) -> None:
        """Tells everybody why there is no meeting, and closes."""
        self.farewell = {"kind": kind, "text": text}
        with contextlib.suppress(RunFolderError, OSError):
            if (find_json(self.terms.file) or {}).get("nonce") == self.nonce:
                self._write_file(kind, text)
        for channel in [one for one in self.open if one.is_proven]:
            self._tell(channel, self.farewell)
        self.told |= set(self.channels) | {0}
        lingers = kind == "refused" and self.is_published
        end = time.monotonic() + _LINGER_S
        everybody = set(range(self.terms.info.world_size))
        with contextlib.suppress(LaunchError, OSError):
            while lingers and time.monotonic() < end and not everybody <= self.told:
                if self.terms.stop_requested():
                    break
                self._serve()
            self._flush(2.0)
        for channel in list(self.open):
            self._drop(channel, None)
        self.store.close()

    def _tell(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(ConnectionEndedError, UnprovenError):
            channel.send(message)

    def _flush(self, limit_s: float) -> None:
        """Sends what is still queued, for as long as that takes within the limit."""
        end = time.monotonic() + limit_s
        waiting = [one for one in self.open if one.is_proven]
        while waiting and time.monotonic() < end:
            still = []
            for channel in waiting:
                with contextlib.suppress(ConnectionEndedError):
                    if not channel.flush():
                        still.append(channel)
            waiting = still
            if waiting:
                time.sleep(0.01)


def _allow_files(needed: int) -> None:
    """Raises this process's own limit of open files to what the connections need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"rank 0 needs {needed} open files and may have {hard}. To fix: raise `ulimit -n` in "
            f"slurm.setup, or ask the site's administrators."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
