"""What all tests share."""


def pytest_configure(config):
    # Inductor's advice to trade digits for speed, given on GPUs with tf32; results here must keep theirs.
    config.addinivalue_line("filterwarnings", "ignore:TensorFloat32 tensor cores:UserWarning")
