"""Probes: what is measured in a model. Tensors in, labelled arrays (xarray.Dataset) and figures (matplotlib Axes) out."""

from probes._figures import save
from probes.anchor import anchor_fidelity, anchor_horizon, plot_anchor_fidelity, plot_anchor_horizon
from probes.fidelity import gain_fidelity, plot_gain_fidelity, plot_solver_fidelity, solver_fidelity
from probes.memory import plot_readback, plot_transition, readback, transition
from probes.perturbation import perturbation_growth, plot_perturbation_growth
from probes.residual import plot_residual_decay, plot_step_cosines, residual_decay, step_cosines
from probes.state import plot_spectrum, plot_state_rank, state_rank, window_rank
from probes.update import plot_update_rank, update_rank
