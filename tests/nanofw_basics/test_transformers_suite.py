"""The transformers model passes the conformance suite."""

from nanofw.testing import ModelSuite
from nanofw_basics.transformers_model import TransformersModel


class TestTransformers(ModelSuite):
    backend = TransformersModel

    def tables(self, model):
        return model.module.get_output_embeddings().weight, model.module.get_input_embeddings().weight
