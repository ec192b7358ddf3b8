"""Stream one long answer, migrate it three times meanwhile, and show that it is the same answer.

    make up
    .venv/bin/python -m examples.migrate_while_streaming

Prints rounds, bytes and pause of each migration. Exits with 1 if text or usage differs from that of the same
request undisturbed.
"""

from __future__ import annotations

import argparse
import sys
import threading

from openai import OpenAI

from examples.fleet import Chat, Fleet, Once, exit_on_connection_error, local_url, stream_chat
from tailrace.cli.admin import connect
from tailrace.cli.tables import copied_text, migration_word, phase_word
from tailrace.tiny.task import task
from tailrace.v1 import migration_pb2, types_pb2

PROMPT = task("wxyz", 120, 120).prompt
GREEDY = {"temperature": 0.0}


def main() -> int:
    """Run both rounds; return 0 if they are equal and all three migrations were committed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default=local_url(), help="OpenAI API (default: the local cluster's)")
    parser.add_argument("--admin", default=None, help="admin API, HOST:PORT (default: the local cluster's)")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()

    with exit_on_connection_error(options.url), connect(options.admin) as admin:
        return run(options, Fleet(admin.stub))


def run(options: argparse.Namespace, fleet: Fleet) -> int:
    """Run both rounds; return 0 if they are equal and all migrations were committed."""
    client = OpenAI(base_url=options.url, api_key="none", timeout=120)
    model = client.models.list().data[0].id

    print(f"model {model}; instances: {', '.join(fleet.instances())}")
    undisturbed = stream_chat(client, model, options.prompt, GREEDY)
    print(
        f"undisturbed: {len(undisturbed.reasoning)} characters of reasoning, "
        f"{len(undisturbed.answer)} of answer, {undisturbed.completion_tokens} tokens"
    )

    records: list[migration_pb2.MigrationRecord] = []
    once = Once()
    moving = threading.Lock()

    def move(chat: Chat) -> None:
        with moving:
            here = fleet.find(chat.request_id)
            if here is None:
                print("the request ended before it could be migrated", file=sys.stderr)
                return
            others = [i for i in fleet.instances() if i != here.instance_id]
            record = fleet.migrate(here.request_id, others[len(records) % len(others)])
            records.append(record)
            print(describe(record))

    def watch(chat: Chat) -> None:
        thought, answered = len(chat.reasoning), len(chat.answer)
        once.when("early in the reasoning", thought > len(undisturbed.reasoning) // 6, lambda: move(chat))
        once.when("late in the reasoning", thought > len(undisturbed.reasoning) // 2, lambda: move(chat))
        once.when("in the answer", answered > len(undisturbed.answer) // 10, lambda: move(chat))

    migrated = stream_chat(client, model, options.prompt, GREEDY, on_progress=watch)
    once.join()

    committed = [r for r in records if r.state == types_pb2.MIGRATION_STATE_COMMITTED]
    phases = {phase_word(record.phase) for record in committed}
    equal = migrated.same_text_and_usage(undisturbed)
    print(f"migrations committed: {len(committed)} of 3, while {' and '.join(sorted(phases))}")
    print(f"text and usage equal to the undisturbed run: {'yes' if equal else 'NO'}")
    return 0 if equal and len(committed) == 3 else 1


def describe(record: migration_pb2.MigrationRecord) -> str:
    """Describe one migration in one line."""
    return (
        f"{record.source_instance_id} -> {record.target_instance_id}: "
        f"{migration_word(record.state)} while {phase_word(record.phase)}, {record.tokens} tokens, "
        f"{copied_text(record)}, "
        f"pause {record.pause_ms:.1f} ms = {record.pause_steps:.1f} decode steps"
        + (f" ({record.error})" if record.error else "")
    )


if __name__ == "__main__":
    sys.exit(main())
