"""The recipe of distconv for Spack; docs/install.md says where it goes."""

from spack.package import *


class PyDistconv(PythonPackage):
    """Convolutional networks of PyTorch with tensors partitioned over many processes."""

    homepage = "https://distconv.invalid"
    git = "https://distconv.invalid/source"

    license("Apache-2.0")

    version("main", branch="main")

    variant("mpi", default=True, description="Start ranks by MPI")
    variant("data", default=True, description="Read HDF5 and zarr files")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-torch@2.6:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))
    depends_on("py-jinja2", type=("build", "run"))
    depends_on("py-mpi4py@4:", type=("build", "run"), when="+mpi")
    depends_on("py-h5py", type=("build", "run"), when="+data")
    depends_on("py-zarr", type=("build", "run"), when="+data")
