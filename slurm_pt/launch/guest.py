"""The other ranks' side of the rendezvous: find rank 0, introduce oneself, wait for its word."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

from slurm_pt.errors import RunFolderError
from slurm_pt.files import find_json, write_json
from slurm_pt.launch import wire
from slurm_pt.launch.environment import rank_host
from slurm_pt.launch.hello import Hello
from slurm_pt.launch.meeting import (
    Meeting,
    MeetingStoppedError,
    RankLostError,
    Terms,
    error_of,
    process_mark,
)
from slurm_pt.launch.network import choose_interface, is_loopback, list_interfaces, plain_address
from slurm_pt.launch.wire import Channel, ConnectionEndedError, Message, UnprovenError

_CONNECT_S = 3.0
_GREETING_S = 5.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_NOTE_AFTER_S = 10.0
"""How long rank 0 may be out of reach before this rank says so in the folder."""


class Guest:
    """The meeting as a rank other than 0 sees it."""

    def __init__(self, terms: Terms, hello: Hello):
        self.terms = terms
        self.hello = hello
        self.hindrance = "no rendezvous file yet"
        self.next_report = terms.started_mono + terms.report_s
        self.unreachable_since: float | None = None
        self.noted: str | None = None

    def meet(self) -> Meeting:
        """The meeting, once rank 0 has declared it complete."""
        channel, address = self._reach()
        try:
            agreement = self._await_agreement(channel)
            return self._meeting(channel, address, agreement)
        except BaseException:
            channel.close()
            raise

    # ------------------------------------------------------------------------- finding rank 0

    def _reach(self) -> tuple[Channel, str]:
        """A proven connection to rank 0 and the address that led there."""
        pause_s = _SHORTEST_PAUSE_S
        while True:
            self.terms.check()
            record = self._read_file()
            if record is not None and (found := self._try_addresses(record)) is not None:
                return found
            self._report()
            self._pause(pause_s)
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def _read_file(self) -> dict[str, Any] | None:
        """The file of a rank 0 that waits. A file of an earlier start is passed over."""
        terms = self.terms
        try:
            # NFS clients remember that a file was not there; opening the folder asks again.
            os.listdir(terms.folder)  # noqa: PTH208
            record: dict[str, Any] | None = find_json(terms.file)
        except (RunFolderError, OSError) as error:
            self.hindrance = str(error)
            return None
        if record is None or "nonce" not in record:
            self.hindrance = "no rendezvous file yet"
            return None
        if record["state"] == "waiting":
            return record
        self.hindrance = f"the rendezvous file is of a start that ended: {record['text']}"
        if self._is_of_this_start(record):
            raise error_of(record["state"], self._too_late(record))
        return None

    def _is_of_this_start(self, record: dict[str, Any]) -> bool:
        """Whether an ended meeting was ours: it ended after we began, or its rank 0 lives on."""
        if record["time"] >= self.terms.started:
            return True
        here = record["machine"] == self.hello.machine
        return here and bool(process_mark(record["pid"]) == record["process_mark"] is not None)

    def _too_late(self, record: dict[str, Any]) -> str:
        if record["state"] != "complete":
            return str(record["text"])
        return (
            f"{self.hello.who} is one too many: the {record['world_size']} ranks of this start "
            f"have come together without it. To fix: start one process per task (no loop or spawn "
            f"inside a task)."
        )

    def _try_addresses(self, record: dict[str, Any]) -> tuple[Channel, str] | None:
        same_machine = record["machine"] == self.hello.machine
        addresses = [a for a in record["addresses"] if same_machine or not is_loopback(a)]
        addresses.sort(key=lambda address: not is_loopback(address))
        if not addresses:
            self._note(
                record,
                f"rank 0 on {record['host']} has no interface but loopback and {self.hello.who} "
                f"is on another machine. To fix: bring a network interface up on "
                f"{record['host']}, or start all ranks on one machine.",
                is_final=True,
            )
            return None
        failures = []
        for address in addresses:
            channel = self._introduce(address, record)
            if isinstance(channel, Channel):
                return channel, address
            failures.append(f"{address} port {record['port']}: {channel}")
        self.hindrance = f"rank 0 on {record['host']} cannot be reached: {'; '.join(failures)}"
        self.unreachable_since = self.unreachable_since or time.monotonic()
        if time.monotonic() - self.unreachable_since > _NOTE_AFTER_S:
            self._note(record, f"{self.hello.who} runs, but {self.hindrance}", is_final=False)
        return None

    def _introduce(self, address: str, record: dict[str, Any]) -> Channel | str:
        """A connection on which rank 0 has welcomed this rank, or why there is none."""
        check = self.terms.check
        connection = wire.connect(address, record["port"], limit_s=_CONNECT_S, check=check)
        if isinstance(connection, str):
            return connection
        channel = Channel(connection, record["nonce"])
        try:
            greeted = wire.await_message(
                channel, channel.read_greeting, limit_s=_GREETING_S, check=check
            )
            if not greeted:
                channel.close()
                return "connected, but nobody answers there"
            channel.send({"kind": "hello", "hello": self.hello.as_json()})
            answer = wire.await_message(
                channel, channel.receive, limit_s=self.terms.timeout_s, check=check
            )
        except (ConnectionEndedError, UnprovenError) as error:
            channel.close()
            return f"connected, but {error}"
        except MeetingStoppedError as error:
            self._say_stopped(channel, error)
            channel.close()
            raise
        if isinstance(answer, dict) and answer["kind"] == "welcome":
            return channel
        channel.close()
        if isinstance(answer, dict):
            raise error_of(answer["kind"], answer["text"])
        return "connected, but it does not welcome this rank"

    def _note(self, record: dict[str, Any], text: str, *, is_final: bool) -> None:
        """Leaves word in the folder, the one way to rank 0 that is left."""
        self.hindrance = text
        if self.noted == record["nonce"]:
            return
        note = {"nonce": record["nonce"], "rank": self.hello.rank, "text": text}
        with contextlib.suppress(RunFolderError):
            path = self.terms.note_file(self.hello.rank)
            write_json(path, {**note, "is_final": is_final}, mode=0o600)
            self.noted = record["nonce"]

    def _report(self) -> None:
        now, terms = time.monotonic(), self.terms
        text = (
            f"{self.hello.who} waits for rank 0 on {rank_host(terms.info, 0)} since "
            f"{now - terms.started_mono:.0f} s of cluster.start_timeout_s={terms.timeout_s:g}: "
            f"{self.hindrance} (folder {terms.folder})"
        )
        if now >= terms.deadline:
            raise RankLostError(
                f"{text}. To fix: look at rank 0's log; the folder must be on a file system that "
                f"all nodes share."
            )
        if now >= self.next_report:
            terms.log(text)
            self.next_report += terms.report_s

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.terms.check()
            time.sleep(min(0.1, left))

    # ------------------------------------------------------------------- waiting for its word

    def _await_agreement(self, channel: Channel) -> Message:
        """Rank 0's decision. It is rank 0 that gives up on missing ranks, and says so."""
        terms = self.terms
        try:
            answer = wire.await_message(
                channel, channel.receive, limit_s=terms.timeout_s + 60, check=terms.check
            )
        except MeetingStoppedError as error:
            self._say_stopped(channel, error)
            raise
        except (ConnectionEndedError, UnprovenError) as error:
            raise RankLostError(
                f"rank 0 on {rank_host(terms.info, 0)} left while the ranks were coming together "
                f"({error}). To fix: look at its log and at its node."
            ) from error
        if not isinstance(answer, dict):
            raise RankLostError(
                f"rank 0 on {rank_host(terms.info, 0)} has said nothing for "
                f"{terms.timeout_s + 60:g} s. To fix: look at its log and at its node."
            )
        if answer["kind"] != "agreement":
            raise error_of(answer["kind"], answer["text"])
        return answer

    def _say_stopped(self, channel: Channel, error: MeetingStoppedError) -> None:
        with contextlib.suppress(ConnectionEndedError, UnprovenError):
            channel.send({"kind": "stopped", "text": str(error)})

    def _meeting(self, channel: Channel, address: str, agreement: Message) -> Meeting:
        several = bool(agreement["several_machines"])
        if is_loopback(address):
            address = agreement["address"]
        source = wire.source_address(address) if several else None
        own = source and plain_address(source)
        chosen = choose_interface(
            list_interfaces(), wanted=self.terms.interface, several_machines=several, source=own
        )
        self.terms.log(
            f"rank={self.hello.rank} host={self.hello.host} interface={chosen.name} "
            f"address={own or (*chosen.addresses, '')[0]} rank0={address} port={agreement['port']}"
        )
        return Meeting(
            address=address,
            port=int(agreement["port"]),
            interface=chosen.name,
            several_machines=several,
            hellos=(self.hello,),
            hosts=tuple(agreement["hosts"]),
            agreed=agreement["agreed"],
            control={0: channel.connection},
        )
