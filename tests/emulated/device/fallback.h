// Every operator that has no rule of its own (`operators.h`): its CPU kernel is launched over aliases of the
// device's memory, and whoever called it gets tensors whose contents are still to come. Their shapes are known
// at once, from its Meta kernel.

#pragma once

#include <unordered_set>

#include <ATen/core/dispatch/Dispatcher.h>

#include "aliases.h"
#include "graphs.h"

namespace emulated {

using torch::jit::Stack;

const std::unordered_set<std::string> kIndexing{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::index_put"};
/// The shape of what comes out depends on what goes in, which the host has to know: it waits.
const std::unordered_set<std::string> kShapedByContents{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::_unique", "aten::unique_consecutive",
    "aten::unique_dim", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::bincount"};

/// An operator that is called: what it is given, and where what it returns comes from.
struct Call {
  c10::OperatorHandle op;
  Stack args;
  bool returns_numbers = false, returns_new = false, returns_views = false;
  std::vector<int> source;    // of each return: the argument that it is, or is a view of; -1: it is new
  std::vector<size_t> sized;  // arguments for output that the operator is to size

  Call(const c10::OperatorHandle& called, Stack* stack) : op(called) {
    const auto n = op.schema().arguments().size();
    args.assign(stack->end() - n, stack->end());
    torch::jit::drop(*stack, n);
    look_at_returns();
    for (size_t i = 0; i < n; i++)
      if (writes(i) && op.schema().arguments()[i].kwarg_only() && args[i].isTensor() &&
          on_device(args[i].toTensor()) && args[i].toTensor().numel() == 0)
        sized.push_back(i);
  }

  const std::string& name() const { return op.schema().name(); }

  bool writes(size_t i) const {
    const auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  bool writes_what_is_there() const {
    for (size_t i = 0; i < args.size(); i++)
      if (writes(i) && std::find(sized.begin(), sized.end(), i) == sized.end()) return true;
    return false;
  }

  void look_at_returns() {
    const auto& returns = op.schema().returns();
    source.assign(returns.size(), -1);
    for (size_t r = 0; r < returns.size(); r++) {
      const auto& type = returns[r].type();
      if (!type->isSubtypeOf(*c10::TensorType::get()) && !type->isSubtypeOf(*c10::ListType::ofTensors())) {
        returns_numbers = true;
        continue;
      }
      const auto* alias = returns[r].alias_info();
      if (!alias) {
        returns_new = true;
        continue;
      }
      for (size_t i = 0; i < args.size(); i++) {
        const auto* given = op.schema().arguments()[i].alias_info();
        if (given && given->beforeSets() == alias->beforeSets()) source[r] = int(i);
      }
      returns_views |= !alias->isWrite();
    }
  }

  /// As on a GPU: all on the device, but for scalars, and for indices, which are copied there.
  void check_devices() const {
    for (size_t i = 0; i < args.size(); i++)
      each_tensor(args[i], [&](const Tensor& t) {
        if (on_device(t) || (t.dim() == 0 && !writes(i))) return;
        if (kIndexing.count(name()) && args[i].isOptionalTensorList())
          return wait_for_current_stream(name() + " with indices of the host's");
        TORCH_CHECK(false,
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                    t.device(), "! (argument ", op.schema().arguments()[i].name(), " of ", name(), ")");
      });
  }

  bool has_mask() const {
    bool found = false;
    each_tensor(args[1], [&](const Tensor& t) {
      found |= t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
    });
    return found;
  }

  /// Whether the host needs what the device computes, to go on.
  bool needs_contents() const {
    if (returns_numbers || kShapedByContents.count(name())) return true;
    if (!kIndexing.count(name()) || !has_mask()) return false;
    const bool fills = name().find("index_put") != std::string::npos && args[2].toTensor().numel() == 1;
    return !fills;  // which is a masked_fill
  }

  Stack on_host(Keepers* keepers) const {
    Stack out;
    for (auto& a : args) out.push_back(for_host(a, keepers));
    return out;
  }

  /// What it returns for tensors without contents, and outputs sized as it wants them; false where it does not say.
  bool find_shapes(Stack given, Stack* shapes) const {
    std::vector<Tensor> outputs;
    for (auto i : sized) outputs.push_back(given[i].toTensor());
    try {
      op.callBoxed(given);
    } catch (const std::exception&) {
      return false;
    }
    *shapes = std::move(given);
    for (size_t k = 0; k < sized.size(); k++) {
      const auto& t = args[sized[k]].toTensor();
      if (t.sizes() != outputs[k].sizes()) at::native::resize_(t, outputs[k].sizes());
    }
    return true;
  }

  bool find_shapes(Stack* shapes) const {
    for (bool keeps_scalars : {true, false}) {
      Stack given;
      for (auto& a : args) given.push_back(for_shapes(a, keeps_scalars));
      if (find_shapes(std::move(given), shapes)) return true;
    }
    if (writes_what_is_there()) return false;
    // Without a Meta kernel: it is run on what memory holds by now, for its shapes alone.
    Stack given = on_host(nullptr);
    for (auto i : sized) given[i] = at::empty({0}, given[i].toTensor().options());
    if (!find_shapes(std::move(given), shapes)) return false;
    count("no shape function: " + name());
    return true;
  }

  /// Nothing is computed: the same memory, seen in another way.
  void return_views(Stack* stack) const {
    Stack found = on_host(nullptr);
    op.callBoxed(found);
    for (size_t r = 0; r < source.size(); r++) {
      TORCH_CHECK(source[r] >= 0 && args[source[r]].isTensor(), "no rule for views of ", name());
      const auto& origin = args[source[r]].toTensor();
      stack->push_back(map_tensors(found[r], [&](const Tensor& t) -> Tensor {
        return at::native::as_strided_tensorimpl(origin, t.sizes(), t.strides(), t.storage_offset());
      }));
    }
  }

  void wait_and_run(Stack* stack) const {
    wait_for_current_stream(needs_contents() ? name() : name() + " (no shape function)");
    Stack found = on_host(nullptr);
    op.callBoxed(found);
    for (size_t r = 0; r < source.size(); r++)
      stack->push_back(source[r] >= 0 ? args[source[r]] : map_tensors(found[r], [](const Tensor& t) {
        auto out = empty_like_on_device(t);
        host_alias(out, nullptr).copy_(t);
        return out;
      }));
  }

  void launch_later(const Stack& shapes, Stack* stack) const {
    auto work = std::make_shared<Work>();
    work->name = name();
    Stack given = on_host(&work->keepers);
    for (size_t i = 0; i < args.size(); i++)
      each_tensor(args[i], [&](const Tensor& t) {
        if (!on_device(t)) return;
        work->bytes += t.nbytes();
        if (settings.finds_races) add_accesses(t, writes(i), &work->accesses);
      });
    std::vector<std::pair<size_t, std::vector<Tensor>>> results;
    for (size_t r = 0; r < source.size(); r++) {
      if (source[r] >= 0) {
        stack->push_back(args[source[r]]);
        continue;
      }
      auto made = map_tensors(shapes[r], [](const Tensor& t) { return empty_like_on_device(t); });
      std::vector<Tensor> aliases;
      for (const auto& t : listed(made)) {
        aliases.push_back(t.defined() ? host_alias(t, &work->keepers) : t);
        if (settings.finds_races) add_accesses(t, true, &work->accesses);
      }
      results.emplace_back(r, std::move(aliases));
      stack->push_back(made);
    }
    work->run = [op = op, given, results] {
      Stack found = given;
      op.callBoxed(found);
      for (const auto& [r, aliases] : results) {
        auto tensors = listed(found[r]);
        for (size_t i = 0; i < aliases.size(); i++)
          if (aliases[i].defined()) aliases[i].copy_(tensors.at(i));
      }
    };
    launch(std::move(work));
  }
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call call(op, stack);
  BelowAutograd below;
  call.check_devices();
  if (call.returns_views) return call.return_views(stack);
  if (call.needs_contents()) return call.wait_and_run(stack);
  Stack shapes;
  const bool asks = call.returns_new || !call.sized.empty();
  if (asks && !call.find_shapes(&shapes)) return call.wait_and_run(stack);
  call.launch_later(shapes, stack);
}

}  // namespace emulated
