"""The errors autotp raises: each names the module, the numbers, the constraint and one way out."""


class AutoTPError(ValueError):
    """Base of every error that autotp raises on purpose."""


class PlanError(AutoTPError):
    """A plan that cannot be carried out on this model at this size."""


class ProofError(AutoTPError):
    """A plan, or a rewritten model, whose numbers differ from the unsharded model's."""


class GatherError(AutoTPError):
    """Whole weights could not be brought together, or could not be split again."""


class CheckpointError(AutoTPError):
    """A checkpoint that is missing, truncated, mis-shaped or does not belong to the model."""


class KernelUnsupported(AutoTPError):
    """A kernel backend named by the user cannot run the problem it was given."""
