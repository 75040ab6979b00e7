from fedpool import errors


def _all(root):
    yield root
    for child in root.__subclasses__():
        yield from _all(child)


def test_every_class_has_a_code_of_its_own():
    classes = list(_all(errors.IbshellError))
    codes = [c.code for c in classes]
    assert len(set(codes)) == len(codes)


def test_every_class_stands_in_the_tree_of_the_docstring():
    for c in _all(errors.IbshellError):
        assert c.__name__ in errors.__doc__


def test_an_error_survives_the_wire():
    sent = errors.Insufficient("16 h100 asked for; 9 are free", "ask for fewer")
    back = errors.from_wire(sent.code, sent.message, sent.hint)
    assert (type(back), back.message, back.hint) == (errors.Insufficient, sent.message, sent.hint)


def test_an_unknown_code_is_kept_in_the_message():
    assert "quantum_flux" in errors.from_wire("quantum_flux", "it broke").message
