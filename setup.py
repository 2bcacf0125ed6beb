"""Package, entry points and extras. Build system and tool settings are in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(
    r'^__version__ = "(.+)"$', (ROOT / "mlflow_tokens" / "__init__.py").read_text("utf-8"), re.MULTILINE
).group(1)  # type: ignore[union-attr]

# Every bound: the oldest release the code was written for, and the next one after the newest tested.
COMPARE = ["pandas>=2.0,<4"]
VIEWS = [*COMPARE, "mlflow>=3.15,<3.18", "dash>=4.4,<5", "dash-ag-grid>=35.2,<36", "plotly>=6.0,<8"]
VISUALDL = ["visualdl>=2.5.3,<2.6"]
PADDLE = ["paddlepaddle>=3.0,<3.4"]
DEMO = [*VIEWS, *VISUALDL, *PADDLE, "snownlp>=0.12.3,<0.13", "sentencepiece>=0.2.0,<0.3"]
TEST = [
    *DEMO,
    "pytest>=8.0,<10",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.100,<7",
    "ruff>=0.15,<0.18",
    "mypy>=1.15,<3",
    "playwright>=1.50,<1.66",
    "mlflow[auth]>=3.15,<3.18",
    "psycopg2-binary>=2.9.5,<3",
]

setup(
    name="mlflow-tokens",
    version=VERSION,
    description="What did each cent of this run buy? Tokens, tokens/s and cost of PaddlePaddle training",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["mlflow_tokens", "mlflow_tokens.*"]), "mlflow_tokens_visualdl"],
    package_dir={"mlflow_tokens_visualdl": "plugins/visualdl/mlflow_tokens_visualdl"},
    package_data={"mlflow_tokens": ["py.typed", "views/assets/*", "pricing/book.json"]},
    install_requires=[
        "mlflow-skinny>=3.15,<3.18",
        "rich>=13,<16",
        'tomli>=2,<3; python_version < "3.11"',
    ],
    extras_require={
        "compare": COMPARE,
        "views": VIEWS,
        "visualdl": VISUALDL,
        "nvml": ["nvidia-ml-py>=12.535"],
        "prometheus": ["prometheus-client>=0.20,<1"],
        "paddle": PADDLE,
        "paddle-gpu": ["paddlepaddle-gpu>=2.6,<3.4"],
        "demo": DEMO,
        "test": TEST,
    },
    entry_points={
        "console_scripts": [
            "mlflow-tokens = mlflow_tokens.cli:main",
            "visualdl-tokens = mlflow_tokens_visualdl.launcher:main",
        ],
        "mlflow.app": [
            "tokens = mlflow_tokens.server:create_app",
            "tokens-basic-auth = mlflow_tokens.server_auth:create_app",
        ],
    },
    classifiers=[
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
