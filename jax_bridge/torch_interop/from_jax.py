"""`from_jax`: a JAX function as a torch function.

The forward pass saves JAX's pullback, and the backward pass runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh as JaxMesh
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jax_bridge.arrays.stored import stored_as
from jax_bridge.torch_interop.buffers import is_list_of_tensors, with_float0
from jax_bridge.torch_interop.devices import MeshPair, mesh_pair
from jax_bridge.torch_interop.hand_over import prepare_to_jax, prepare_to_torch
from jax_bridge.torch_interop.route import Options, array_sharding, layouts_of, named_like
from torch_bridge.dtensor.function import dtensor_of_block
from torch_bridge.dtensor.placements import local_block_under
from xshard import Layout
from xshard.errors import MeshError, api_boundary

Arrays = Sequence[jax.Array]
Group = list[Tensor]  # the tensors of one array, one for each device of this process

# For each leaf of the arguments None if it is a group of tensors, else the leaf itself. Autograd sees only
# tensors, in one list: this tells where they belong. f(x, 3, y) on 2 devices -> [None, 3, None], with the
# tensors [x0, x1, y0, y1].
NonTensors = Sequence[Any]
OPTIONS = Options()


@api_boundary
def from_jax(
    fn: Callable[..., Any], in_layouts: Any, out_layouts: Any, mesh: JaxMesh
) -> Callable[..., Any]:
    """Turn a function of global JAX arrays into a differentiable function of local tensors.

        layer = from_jax(jax_layer, ("n/dp i", "i o/tp"), "n/dp o/tp", mesh)
        y = layer(x, w)     # x: [n/2, i], w: [i, o/4] -> y: [n/2, o/4]

    The new function takes for every array a tensor, a list with one tensor per device if the
    process has several, or a DTensor; given a DTensor it returns DTensors. Other arguments (a
    jax.Array, a number, a key) are passed on to `fn` and have no gradient. All processes of the
    mesh call it. Memory is shared if possible; as with torch's own functions, the backward pass
    raises if a saved tensor was written to.

    Compiled once per shape, dtype and set of arguments with a gradient. torch.compile calls it
    between its graphs and does not trace it, nor does torch.func.

    Args:
        fn: Takes and returns arrays or pytrees of them. It may be a `jax.shard_map` or a `jit` over
            the mesh.
        in_layouts: The layouts of the arguments: one for all, or a pytree prefix, such as a tuple
            with one per argument. The layout of a gradient is the dual of its tensor's: along a
            replicated axis every process gets the whole gradient.
        out_layouts: The layouts of the results, given as those of the arguments.
        mesh: JAX's mesh, over the devices of torch's processes (`torch_interop.initialize`).

    Returns:
        The new function. Calls raise as `to_jax` and `to_torch` do, and any error of `fn`.

    Raises:
        MeshError: In a call: the DTensor's mesh is not JAX's, or a process is outside of it.

    Examples:
        >>> mesh = jax.make_mesh((1,), ("tp",))
        >>> layer = from_jax(lambda x, w: jax.numpy.tanh(x @ w), ("n i", "i o/tp"), "n o/tp", mesh)
        >>> w = torch.zeros(3, 2, requires_grad=True)
        >>> layer(torch.ones(4, 3), w).sum().backward()
        >>> w.grad[0]
        tensor([4., 4.])
    """
    call = _JaxFunction(fn, in_layouts, out_layouts, mesh)
    function: Any = torch.compiler.disable(call.__call__)
    return named_like(fn, function, "from_jax")


class _Argument(NamedTuple):
    """One leaf of the arguments: a group of tensors, or something else that `fn` takes.

    Something else is a jax.Array, a number or a key, and gets no gradient.
    """

    layout: Layout
    tensors: Group
    non_tensor: Any  # None for tensors

    @classmethod
    def of(cls, x: Any, layout: Layout) -> _Argument:
        if isinstance(x, DTensor):
            x = local_block_under(x, layout, str(layout))
        if isinstance(x, Tensor):
            x = [x]
        if isinstance(x, list):
            return cls(layout, tensors=x, non_tensor=None)
        return cls(layout, tensors=[], non_tensor=x)

    def to_jax(self, mesh: JaxMesh) -> Any:
        """Return the array of the tensors; anything else as it is."""
        return _to_jax(self.tensors, self.layout, mesh) if self.tensors else self.non_tensor

    @property
    def gets_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors)


@dataclass(eq=False)
class _JaxFunction:
    """A JAX function with its layouts, and the programs that are compiled for it."""

    fn: Callable[..., Any]
    in_layouts: Any
    out_layouts: Any
    mesh: JaxMesh
    _programs: dict[Any, VjpProgram] = field(default_factory=dict)

    @api_boundary
    def __call__(self, *args: Any) -> Any:
        """Run the JAX function on tensors: hand them to JAX, run its program, and hand the results back.

        f({"w": w}, 3) has the leaves w and 3: JAX's program gets an array and 3, autograd the
        tensors of w, and `NonTensors` to tell where they belong.
        """
        meshes = mesh_pair(self.mesh)
        has_several_devices = len(meshes.local_positions) > 1
        # In a process with one device a list of tensors is a tree, elsewhere a leaf.
        is_leaf = is_list_of_tensors if has_several_devices else None
        leaves, tree = jax.tree.flatten(args, is_leaf)
        layouts = _layouts_of("in_layouts", self.in_layouts, tree)
        device_mesh = self._device_mesh(leaves)
        arguments = list(map(_Argument.of, leaves, layouts))
        arrays = [argument.to_jax(self.mesh) for argument in arguments]
        program = self._program(meshes, tree, arguments, arrays)
        output_tensors = _apply(program, arguments, arrays)
        results = program.unwrap_groups(program.group_by_array(output_tensors))
        if device_mesh is not None:
            results = program.as_dtensors(results, device_mesh)
        return jax.tree.unflatten(program.out_tree, results)

    def _device_mesh(self, leaves: Sequence[Any]) -> DeviceMesh | None:
        """Return the mesh of the first DTensor among the arguments; None without any.

        Raises MeshError if its axes or the order of its devices differ from JAX's mesh.
        """
        device_mesh = next((x.device_mesh for x in leaves if isinstance(x, DTensor)), None)
        meshes = mesh_pair(self.mesh, device_mesh)
        has_same_axes = meshes.torch_axes == meshes.jax_axes
        if not has_same_axes or meshes.torch_devices != meshes.jax_devices:
            in_torch = f"the DTensor's mesh {meshes.torch_axes!r}"
            reason = f"{in_torch} is not JAX's {meshes.jax_axes!r} with the same order of devices"
            hint = "a function has one mesh: redistribute the DTensor, or make JAX's mesh equal to its mesh"
            raise MeshError(reason, hint=hint)
        return device_mesh

    def _program(
        self,
        meshes: MeshPair,
        tree: Any,
        arguments: Sequence[_Argument],
        arrays: Arrays,
    ) -> VjpProgram:
        """Return the forward and backward programs for such arguments, from the cache if possible.

        Args:
            meshes: The meshes of torch and JAX.
            tree: The structure of the arguments.
            arguments: Their leaves.
            arrays: The leaves as the function takes them.
        """
        layouts = tuple(argument.layout for argument in arguments)
        differentiated = tuple(i for i, argument in enumerate(arguments) if argument.gets_gradient)
        in_avals = tuple(map(jax.typeof, arrays))
        # All that the compiled programs depend on.
        key = (tree, layouts, in_avals, differentiated)
        if key in self._programs:
            return self._programs[key]
        with jax.set_mesh(self.mesh):
            results = jax.eval_shape(self.fn, *jax.tree.unflatten(tree, arrays))
        out_avals, out_tree = jax.tree.flatten(results)
        out_layouts = _layouts_of("out_layouts", self.out_layouts, out_tree)
        program = VjpProgram(
            fn=self.fn,
            meshes=meshes,
            in_tree=tree,
            in_avals=in_avals,
            in_layouts=layouts,
            differentiated=differentiated,
            out_tree=out_tree,
            out_avals=tuple(out_avals),
            out_layouts=out_layouts,
        )
        _ = program.out_shardings  # raises before anything runs
        self._programs[key] = program
        return program


def _layouts_of(keyword: str, layouts: Any, tree: Any) -> tuple[Layout, ...]:
    """Return the layout of every leaf of a pytree structure: see `layouts_of`."""
    return tuple(map(Layout.parse, layouts_of(keyword, layouts, tree)))


def _to_jax(group: Group, layout: Layout, mesh: JaxMesh) -> jax.Array:
    hand_over = prepare_to_jax(group, layout, mesh, torch_mesh=None, options=OPTIONS)
    return hand_over()


def _apply(
    program: VjpProgram, arguments: Sequence[_Argument], arrays: list[Any]
) -> tuple[Tensor, ...]:
    """Run a program under autograd: the tensors of all results, group after group.

    Autograd follows tensors alone: it gets those of the arguments as well as their arrays.

    Args:
        program: The program.
        arguments: The leaves of the function's arguments.
        arrays: The same, as the program takes them.
    """
    non_tensors = [argument.non_tensor for argument in arguments]
    tensors = chain.from_iterable(argument.tensors for argument in arguments)
    outputs: tuple[Tensor, ...] = _Apply.apply(program, arrays, non_tensors, *tensors)
    return outputs


class _Apply(torch.autograd.Function):
    """The call as autograd sees it: tensors of all arguments -> tensors of all outputs."""

    @staticmethod
    def forward(
        ctx: Any,
        program: VjpProgram,
        arrays: list[Any],
        non_tensors: NonTensors,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the JAX function, and save its pullback (cotangents -> gradients) for the backward pass.

        Args:
            ctx: Autograd's context; what the backward pass needs is saved on it.
            program: The program.
            arrays: The leaves of the function's arguments, as it takes them.
            non_tensors: Which leaves are no tensors: see `NonTensors`.
            tensors: The tensors of all other leaves, group after group. `arrays` has their values,
                too: autograd has to see what the results depend on.

        Returns:
            The tensors of all results, group after group.
        """
        # Specs without a mesh need one in context, and autograd's threads have none.
        with jax.set_mesh(program.meshes.jax_mesh):
            outputs, pullback = program.compiled_forward(*arrays)
        groups = []
        for output, layout in zip(outputs, program.out_layouts, strict=True):
            groups.append(_copy_if_argument(program.to_torch(output, layout), tensors))
        ctx.program = program
        ctx.non_tensors = non_tensors
        ctx.pull = pullback
        ctx.n_tensors = len(tensors)
        ctx.settings = _JaxSettings.now()
        if program.differentiated:
            # The pullback reads the memory of arguments and of some results. Torch raises in the
            # backward pass if a tensor that is saved here was written to meanwhile.
            read_groups = [groups[i] for i in program.outputs_read_by(pullback, outputs)]
            ctx.save_for_backward(*tensors, *chain.from_iterable(read_groups))
        # All in one call, since a second one would replace the first.
        ctx.mark_non_differentiable(*program.integer_tensors(groups))
        return tuple(chain.from_iterable(groups))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Run JAX's pullback on the cotangents of the results.

        Whole numbers have no cotangents: the tensors that torch gives for these are left out.

        Returns:
            As torch wants it, one entry per argument of `forward`: the gradients of the tensors,
            None for those without and for the arguments that are no tensors.
        """
        program = ctx.program
        # Reading them makes torch check that none was written to.
        tensors = ctx.saved_tensors[: ctx.n_tensors]
        groups = program.group_by_array(cotangents)
        inexact_groups = [groups[i] for i in program.inexact_outputs]
        with ctx.settings.in_effect():
            if torch.is_grad_enabled():  # the backward pass is recorded, for second derivatives
                gradients = program.recorded_gradients(ctx.non_tensors, tensors, inexact_groups)
            else:
                gradients = program.gradients(ctx.pull, inexact_groups)
        gradients_of_leaf = dict(zip(program.differentiated, gradients, strict=True))
        no_gradients = [None] * program.n_local_devices
        results: list[Tensor | None] = [None, None, None]  # of program, arrays and non_tensors
        for i, non_tensor in enumerate(ctx.non_tensors):
            if non_tensor is None:  # leaf i is a group of tensors
                results += gradients_of_leaf.get(i, no_gradients)
        return tuple(results)


class _JaxSettings(NamedTuple):
    """JAX's settings in the thread of a forward pass.

    Autograd runs the backward pass of a GPU in another thread, which has settings of its own.
    """

    x64: bool
    matmul_precision: str | None

    @classmethod
    def now(cls) -> _JaxSettings:
        """Return the settings of this thread."""
        config: Any = jax.config
        return cls(config.jax_enable_x64, config.jax_default_matmul_precision)

    @contextmanager
    def in_effect(self) -> Iterator[None]:
        """Run the body of a `with` under these settings."""
        with jax.enable_x64(self.x64), jax.default_matmul_precision(self.matmul_precision):
            yield


def _copy_if_argument(group: Group, arguments: Sequence[Tensor]) -> Group:
    """Return the tensors of a result, copied where the function has returned an argument as it was.

    Such a result has the memory of the argument: a write to one would change the other.
    """
    argument_addresses = {x.data_ptr() for x in arguments}
    return [x.clone() if x.data_ptr() in argument_addresses else x for x in group]


@dataclass(frozen=True, eq=False)
class VjpProgram:
    """The forward and backward programs of a function, from leaves of its arguments to results.

    Attributes:
        fn: The function.
        meshes: The meshes of torch and JAX.
        in_tree: The structure of its arguments.
        in_avals: JAX's types of their leaves.
        in_layouts: The layouts of their leaves.
        differentiated: The indices of the leaves that get a gradient.
        out_tree: The structure of the results.
        out_avals: JAX's types of their leaves.
        out_layouts: The layouts of their leaves.
    """

    fn: Callable[..., Any]
    meshes: MeshPair
    in_tree: Any
    in_avals: tuple[Any, ...]
    in_layouts: tuple[Layout, ...]
    differentiated: tuple[int, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    out_layouts: tuple[Layout, ...]

    @cached_property
    def inexact_outputs(self) -> tuple[int, ...]:
        """Indices of the outputs that have a cotangent: floats and complex numbers."""
        avals = enumerate(self.out_avals)
        return tuple(i for i, aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact))

    @cached_property
    def out_shardings(self) -> tuple[Any, ...]:
        """JAX's shardings of the results."""
        return self._shardings(self.out_layouts, self.out_avals)

    @cached_property
    def cotangent_layouts(self) -> tuple[Layout, ...]:
        """The layouts of the outputs' cotangents."""
        return tuple(self.out_layouts[i].dual for i in self.inexact_outputs)

    @cached_property
    def gradient_layouts(self) -> tuple[Layout, ...]:
        """The layouts of the gradients of the leaves that get one."""
        return tuple(self.in_layouts[i].dual for i in self.differentiated)

    # ---- tensors and arrays

    @property
    def n_local_devices(self) -> int:
        """How many devices this process has, and so the length of a group."""
        return len(self.meshes.local_positions)

    def group_by_array(self, tensors: Sequence[Tensor]) -> list[Group]:
        """Group the tensors of several arrays by array: on 2 devices [a0, a1, b0, b1] -> [a0, a1], ..."""
        n_devices = self.n_local_devices
        starts = range(0, len(tensors), n_devices)
        return [list(tensors[start : start + n_devices]) for start in starts]

    def unwrap_groups(self, groups: list[Group]) -> list[Any]:
        """Return groups as users give and get them: in a process with one device, the tensor itself."""
        if self.n_local_devices > 1:
            return groups
        return [group[0] for group in groups]

    def to_torch(self, array: jax.Array, layout: Layout) -> Group:
        """Hand an array over to torch."""
        # The program's outputs are in storage order, which only the layout tells.
        array = stored_as(array, layout, self.meshes.jax_mesh)
        hand_over = prepare_to_torch(array, layout, self.meshes.jax_mesh, OPTIONS)
        blocks = hand_over()
        return blocks if isinstance(blocks, list) else [blocks]

    def as_dtensors(self, blocks: Sequence[Tensor], device_mesh: DeviceMesh) -> list[Any]:
        """Return the outputs as DTensors, given this process's block of each."""
        outputs = zip(blocks, self.out_layouts, self.out_avals, strict=True)
        return [
            dtensor_of_block(block, layout, device_mesh, aval.shape)
            for block, layout, aval in outputs
        ]

    def integer_tensors(self, groups: Sequence[Group]) -> list[Tensor]:
        """Return the tensors of the outputs of integers and booleans, which have no gradient."""
        tensors: list[Tensor] = []
        for i, group in enumerate(groups):
            if i not in self.inexact_outputs:
                tensors += group
        return tensors

    def outputs_read_by(self, pullback: Any, outputs: Arrays) -> list[int]:
        """Return the indices of the outputs whose memory the pullback reads: it has saved them."""
        saved: set[tuple[Any, int]] = set()
        for x in jax.tree.leaves(pullback):
            saved |= _memory(x)
        return [i for i, x in enumerate(outputs) if not saved.isdisjoint(_memory(x))]

    # ---- forward and backward

    def gradients(self, pull: Any, groups: list[Group]) -> list[Group]:
        """Return the tensors of the gradients, given those of the cotangents."""
        cotangents = []
        for group, layout in zip(groups, self.cotangent_layouts, strict=True):
            cotangents.append(_to_jax(group, layout, self.meshes.jax_mesh))
        with jax.set_mesh(self.meshes.jax_mesh):
            gradients = self._compiled_backward(pull, cotangents)
        return list(map(self.to_torch, gradients, self.gradient_layouts))

    def recorded_gradients(
        self, non_tensors: NonTensors, tensors: Sequence[Tensor], cotangents: list[Group]
    ) -> list[Group]:
        """Compute gradients by a function that autograd can differentiate, for second derivatives.

        The function, `self._pullback`, comes from `from_jax`, too: it takes a tensor for each
        array, or a list of them in a process with several devices (a group).

        Args:
            non_tensors: Which leaves of the arguments are no tensors: see `NonTensors`.
            tensors: The tensors of all other leaves, group after group.
            cotangents: A group for each result that has a cotangent.

        Returns:
            A group for each argument that gets a gradient.
        """
        next_group = iter(self.unwrap_groups(self.group_by_array(tensors)))
        leaves = [next(next_group) if x is None else x for x in non_tensors]
        gradients = self._pullback(leaves, self.unwrap_groups(cotangents))
        return self.group_by_array(jax.tree.leaves(gradients))

    @cached_property
    def _pullback(self) -> _JaxFunction:
        """The gradients as a function of leaves and cotangents."""

        def gradients(leaves: Arrays, cotangents: Arrays) -> list[jax.Array]:
            _, pull = self._vjp(*leaves)
            return list(self._pull(pull, cotangents))

        in_layouts = (list(self.in_layouts), list(self.cotangent_layouts))
        out_layouts = list(self.gradient_layouts)
        return _JaxFunction(gradients, in_layouts, out_layouts, self.meshes.jax_mesh)

    @cached_property
    def compiled_forward(self) -> Callable[..., tuple[tuple[jax.Array, ...], Any]]:
        """The function: leaves -> outputs and the pullback, None if no leaf gets a gradient."""
        # XLA chooses how the pullback's own arrays are sharded.
        return jax.jit(self._vjp, out_shardings=(self.out_shardings, None))

    @cached_property
    def _compiled_backward(self) -> Callable[..., tuple[jax.Array, ...]]:
        avals = [self.in_avals[i] for i in self.differentiated]
        return jax.jit(self._pull, out_shardings=self._shardings(self.gradient_layouts, avals))

    def _shardings(self, layouts: Sequence[Layout], avals: Sequence[Any]) -> tuple[Any, ...]:
        """Return JAX's shardings of arrays of these types."""
        layouts_and_avals = zip(layouts, avals, strict=True)
        return tuple(
            array_sharding(layout, self.meshes, aval.shape) for layout, aval in layouts_and_avals
        )

    def _vjp(self, *leaves: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        """Run the function, and return its outputs and its pullback (cotangents -> gradients).

        The pullback is a pytree of saved arrays, so that a jitted function can return it. It is
        None if no argument gets a gradient.
        """
        if not self.differentiated:
            return self._outputs(*leaves), None

        # JAX differentiates a function by all of its arguments: the other leaves are no arguments.
        def outputs_of(*differentiated_leaves: jax.Array) -> tuple[jax.Array, ...]:
            all_leaves = list(leaves)
            for i, x in zip(self.differentiated, differentiated_leaves, strict=True):
                all_leaves[i] = x
            return self._outputs(*all_leaves)

        return jax.vjp(outputs_of, *[leaves[i] for i in self.differentiated])

    def _outputs(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        """Run the function on leaves of its arguments, and return the leaves of its results."""
        return tuple(jax.tree.leaves(self.fn(*jax.tree.unflatten(self.in_tree, leaves))))

    def _pull(self, pull: Any, cotangents: Arrays) -> tuple[jax.Array, ...]:
        """Return the gradients of the leaves that get one.

        Complex gradients are torch's: the conjugates of JAX's.

        Args:
            pull: JAX's pullback.
            cotangents: One for each output of floats or complex numbers.
        """
        cotangent_of_output = dict(
            zip(self.inexact_outputs, map(_conjugate, cotangents), strict=True)
        )
        return tuple(map(_conjugate, pull(with_float0(cotangent_of_output, self.out_avals))))


def _conjugate(x: jax.Array) -> jax.Array:
    """Conjugate complex numbers: torch's convention for cotangents <-> JAX's."""
    return x.conj() if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _memory(x: Any) -> set[tuple[Any, int]]:
    """Return the memory of an array's local blocks, as (device, address of the first byte)."""
    if not isinstance(x, jax.Array) or not x.size:
        return set()
    shards = x.addressable_shards
    return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}
