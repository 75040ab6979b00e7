"""Canonical JSON, signed notes, checkpoints and cosignatures, against the examples of those who defined them."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as some

from fedpool.errors import IntegrityError, UsageError
from fedpool.ledger import canonical, notes

OWNER, WITNESS = Ed25519PrivateKey.from_private_bytes(bytes(32)), Ed25519PrivateKey.from_private_bytes(b"w" * 32)
ORIGIN = "ibshell.example/pool/zurich"
CHECKPOINT = notes.Checkpoint(ORIGIN, 42, bytes(range(32)))

# The example in the documentation of golang.org/x/mod/sumdb/note.
NEUMANN = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
SAYING = (
    "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)


def key(of, kind=notes.ED25519, name=ORIGIN):
    return notes.Key(name, of.public_key().public_bytes_raw(), kind)


def test_a_note_that_another_implementation_signed():
    note, neumann = notes.decode(SAYING.encode()), notes.parse_key(NEUMANN)
    assert notes.signers(note, [neumann]) == {"PeterNeumann": 0}
    assert neumann.line() == NEUMANN and note.encode() == SAYING.encode()
    with pytest.raises(IntegrityError, match="in the name of PeterNeumann is not of its key"):
        notes.signers(notes.decode(SAYING.replace("don't", "do").encode()), [neumann])


def test_a_checkpoint_is_signed_by_its_log_and_cosigned_by_witnesses():
    text = CHECKPOINT.text()
    assert text == f"{ORIGIN}\n42\nAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n"
    note = notes.Note(text).signed(notes.sign(text, ORIGIN, OWNER), notes.cosign(text, "basel", WITNESS, 1_700_000_000))
    note = notes.decode(note.encode())
    known = [key(OWNER), key(WITNESS, notes.COSIGNATURE, "basel")]
    assert notes.signers(note, known) == {ORIGIN: 0, "basel": 1_700_000_000}
    assert notes.signers(note, known[1:]) == {"basel": 1_700_000_000}, "others' signatures are ignored"
    assert notes.parse_checkpoint(note, ORIGIN) == CHECKPOINT
    assert [notes.parse_key(one.line()) for one in known] == known
    assert note.signed(*note.signatures) == note
    with pytest.raises(IntegrityError, match=r"not of ibshell\.example/pool/basel"):
        notes.parse_checkpoint(note, "ibshell.example/pool/basel")


def test_a_witness_signs_the_time_too():
    text = CHECKPOINT.text()
    signature = notes.cosign(text, "basel", WITNESS, 1_700_000_000)
    later = notes.Signature("basel", signature.key_id, (1_700_000_001).to_bytes(8, "big") + signature.value[8:])
    with pytest.raises(IntegrityError, match="basel"):
        notes.signers(notes.Note(text, (later,)), [key(WITNESS, notes.COSIGNATURE, "basel")])
    owners = notes.Signature("basel", signature.key_id, signature.value[:7])
    with pytest.raises(IntegrityError, match="without a time"):
        notes.signers(notes.Note(text, (owners,)), [key(WITNESS, notes.COSIGNATURE, "basel")])


def test_a_checkpoint_changed_at_any_place_is_found():
    text = CHECKPOINT.text()
    data = notes.Note(text).signed(notes.sign(text, ORIGIN, OWNER)).encode()
    for at in range(len(data)):
        changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        try:
            note = notes.decode(changed)
            signed = notes.signers(note, [key(OWNER)])
        except IntegrityError:
            continue
        assert signed == {}, f"byte {at}: {changed!r}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text\n",
        b"text\n\n",
        b"text\n\nno dash\n",
        "text\n\n— name !!!!\n".encode(),
        "text\n\n— name AAAA\n".encode(),
        "text\n\n— name AAAAAAAA".encode(),
        "te\x1bxt\n\n— name AAAAAAAA\n".encode(),
        b"\xff\n\n",
        b"x" * ((1 << 20) + 1),
    ],
)
def test_what_is_no_note_is_refused(data):
    with pytest.raises(IntegrityError):
        notes.decode(data)


@pytest.mark.parametrize("lines", ["", "\n", "042\nAAAA", f"042\n{'A' * 43}=", f"-1\n{'A' * 43}=", f"4\n{'A' * 42}=="])
def test_what_is_no_checkpoint_is_refused(lines):
    with pytest.raises(IntegrityError, match="no checkpoint"):
        notes.parse_checkpoint(notes.Note(f"{ORIGIN}\n{lines}\n"), ORIGIN)


@pytest.mark.parametrize(
    "line", ["", "a+b", NEUMANN[:-4], NEUMANN.replace("c7", "c8"), f"a b{NEUMANN}", "a+00000000+AAAA"]
)
def test_what_is_no_key_is_refused(line):
    with pytest.raises(UsageError):
        notes.parse_key(line)


# --- canonical JSON

SAFE = some.recursive(
    some.none() | some.booleans() | some.integers(-canonical.INTEGER_MAX, canonical.INTEGER_MAX) | some.text(),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(), inner, max_size=4),
    max_leaves=20,
)


def test_the_examples_of_rfc_8785():
    shown = {"literals": [None, True, False], "string": '€$\x0f\nA\'B"\\\\"/'}
    expected = '{"literals":[null,true,false],"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    assert canonical.encode(shown) == expected.encode()
    # 3.2.3: names in the order of their UTF-16 code units.
    names = ["€", "\r", "\ufb33", "1", "😀", "\x80", "ö"]
    assert list(canonical.decode(canonical.encode(dict.fromkeys(names)))) == [
        "\r",
        "1",
        "\x80",
        "ö",
        "€",
        "😀",
        "\ufb33",
    ]


@given(SAFE)
def test_one_value_has_one_encoding(value):
    data = canonical.encode(value)
    assert canonical.decode(data) == value and canonical.encode(canonical.decode(data)) == data


@pytest.mark.parametrize(
    "data",
    [
        b'{"b":1,"a":2}',
        b'{"a":1, "b":2}',
        b'{"a":1,"a":1}',
        b"1.0",
        b"1e3",
        b"-0",
        b"NaN",
        b"9007199254740992",
        b'"\\u0041"',
        b'"\\ud800"',
        b'"\xff"',
        b"[" * 40 + b"]" * 40,
        b"[" * 100_000,
        b"",
    ],
)
def test_what_is_not_canonical_is_refused(data):
    with pytest.raises(IntegrityError):
        canonical.decode(data)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, 0.5]}, r"entry\.a\[1\] is a float"),
        (1 << 53, "the limit is 9007199254740991"),
        ("\ud800", "surrogate"),
        ({"a": b"x"}, r"entry\.a is a bytes"),
    ],
)
def test_what_has_no_canonical_form_is_named(value, says):
    with pytest.raises(UsageError, match=says):
        canonical.encode(value)


def test_signatures_are_base64_of_id_and_value():
    signature = notes.sign("x\n", ORIGIN, OWNER)
    assert base64.b64decode(signature.line().split()[-1]) == key(OWNER).id + signature.value
