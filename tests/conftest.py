"""What all tests share."""


def pytest_configure(config):
    # Inductor imports what torch itself deprecates, and on a GPU with tf32 advises to trade digits for speed;
    # results here must keep theirs.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.script_method` is deprecated")
    config.addinivalue_line("filterwarnings", "ignore:TensorFloat32 tensor cores")
