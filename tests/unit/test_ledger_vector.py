"""The test vector of site/ledger.md is what the code makes, and what it accepts."""

import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.leasing.recorded import Replay
from fedpool.ledger import merkle, notes
from fedpool.ledger.verification import Verification

PAGE = Path(__file__).parents[2] / "site" / "ledger.md"


def test_the_vector_of_the_specification():
    said = PAGE.read_text().partition("## Test vector")[2]
    lines, note, keys = re.findall(r"```\n(.*?)```", said, re.DOTALL)
    records, hashes = lines.splitlines()[::2], lines.splitlines()[1::2]
    owner, witness = (notes.parse_key(line) for line in keys.splitlines())
    assert [merkle.leaf_hash(record.encode()).hex() for record in records] == hashes
    check = Verification("north", owner, Replay().take)
    for record in records:
        check.take(record.encode())
    assert check.finish(note.encode()).size == len(records) and not check.findings
    assert notes.signers(notes.decode(note.encode()), [owner, witness]) == {owner.name: 0, witness.name: 1796256010}
    # Ed25519 is deterministic, so the note can be made again to the byte.
    signer, cosigner = (Ed25519PrivateKey.from_private_bytes(bytes(range(at, at + 32))) for at in (0, 32))
    text = notes.Checkpoint(owner.name, check.size, check.root).text()
    made = notes.Note(text).signed(
        notes.sign(text, owner.name, signer), notes.cosign(text, witness.name, cosigner, 1796256010)
    )
    assert made.encode() == note.encode()
