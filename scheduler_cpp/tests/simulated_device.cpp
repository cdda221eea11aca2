#include "tests/simulated_device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

namespace tokenspeed::testing {

void Require(bool condition, const char* claim) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", claim);
  std::abort();
}

void SimulatedDevice::Submit(const std::string& id, std::vector<int32_t> tokens, uint64_t identity) {
  requests_[id] = Request{.tokens = std::move(tokens), .identity = identity};
}

std::vector<SimulatedDevice::Row> SimulatedDevice::Run(const ExecutionPlan& plan) {
  host_.StartStores(plan);
  for (const auto& [name, blocks] : plan.pages_to_zero) {
    std::size_t group = 0;
    while (config_.cache_groups[group].group_id != name) ++group;
    for (const int32_t block : blocks) {
      const auto first = contents_.lower_bound({group, block, 0});
      contents_.erase(first, contents_.lower_bound({group, block + 1, 0}));
    }
  }
  host_.Load(plan);
  const ForwardBatch& batch = *plan.forward;
  std::vector<Row> rows;
  std::size_t first_input = 0;
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    Require(requests_.contains(batch.request_ids[row]), "a plan names live requests only");
    rows.push_back(row < batch.NumExtends() ? RunPrefill(batch, row, first_input) : RunDecode(batch, row));
    first_input += static_cast<std::size_t>(batch.input_lengths[row]);
  }
  return rows;
}

SimulatedDevice::Step SimulatedDevice::StepOf(const ForwardBatch& batch, std::size_t row,
                                              const Request& request) const {
  Step step;
  for (const CacheGroupConfig& group : config_.cache_groups) {
    const auto grid = batch.block_tables.find(group.group_id);
    Require(grid != batch.block_tables.end(), "every group has a table");
    step.tables.push_back(grid->second.Row(row));
  }
  uint64_t print = request.identity;
  for (const int32_t token : request.tokens) {
    print = (print ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15ULL;
    print ^= print >> 29;
    step.prints.push_back(print);
  }
  return step;
}

std::vector<int32_t> SimulatedDevice::Sample(Request& request, int32_t count) const {
  std::vector<int32_t> sampled;
  // Few distinct values, so that outputs of different requests coincide and are shared.
  for (int32_t index = 0; index < count; ++index) sampled.push_back((request.tokens.back() * 7 + index) % 3);
  request.tokens.insert(request.tokens.end(), sampled.begin(), sampled.end());
  return sampled;
}

SimulatedDevice::Row SimulatedDevice::RunPrefill(const ForwardBatch& batch, std::size_t row,
                                                 std::size_t first_input) {
  Request& request = requests_.at(batch.request_ids[row]);
  Step step = StepOf(batch, row, request);
  const int32_t start = batch.extend_prefix_lens[row];
  const int32_t length = batch.input_lengths[row];
  step.replay = batch.extend_replay_lens[row];
  step.begin = start + step.replay;
  step.end = start + length;
  Require(start >= 0 && length > 0 && step.end <= batch.prefill_lengths[row], "a chunk lies within its prompt");
  Require(batch.prefill_lengths[row] <= static_cast<int32_t>(request.tokens.size()), "a prompt is made of tokens");
  Require(std::equal(request.tokens.begin() + start, request.tokens.begin() + step.end,
                     batch.input_ids.begin() + static_cast<std::ptrdiff_t>(first_input)),
          "the input of a chunk is a part of the prompt");
  const int32_t boundary = step.end - step.end % config_.prefix_granularity;
  for (std::size_t group = 0; group < step.tables.size(); ++group) {
    const int32_t granularity = config_.cache_groups[group].block_granularity;
    if (!config_.cache_groups[group].IsState()) {
      ComputeHistory(group, step);
      continue;
    }
    std::map<int32_t, int32_t> writes;
    if (boundary > step.begin) writes[(boundary - 1) / granularity] = boundary;
    writes[(step.end - 1) / granularity] = step.end;
    Scan(group, step, writes);
  }
  const bool completes = step.end == batch.prefill_lengths[row];
  return Row{.id = batch.request_ids[row],
             .slot = batch.request_pool_indices[row],
             .tokens = completes ? Sample(request, 1) : std::vector<int32_t>()};
}

SimulatedDevice::Row SimulatedDevice::RunDecode(const ForwardBatch& batch, std::size_t row) {
  Request& request = requests_.at(batch.request_ids[row]);
  const int32_t width = config_.decode_input_tokens;
  const auto begin = static_cast<int32_t>(request.tokens.size()) - 1;
  const std::vector<int32_t> accepted = Sample(request, accept_());
  Step step = StepOf(batch, row, request);
  step.begin = begin;
  step.end = begin + static_cast<int32_t>(accepted.size());
  for (std::size_t group = 0; group < step.tables.size(); ++group) {
    const int32_t granularity = config_.cache_groups[group].block_granularity;
    // Rejected drafts are written too, and overwritten by the next step.
    for (int32_t draft = 0; draft < width; ++draft) BlockAt(group, step, (begin + draft) / granularity);
    if (!config_.cache_groups[group].IsState()) {
      ComputeHistory(group, step);
      continue;
    }
    std::map<int32_t, int32_t> writes;
    for (int32_t draft = 0; draft < width; ++draft) writes[(begin + draft) / granularity] = 0;
    writes[(step.end - 1) / granularity] = step.end;
    Scan(group, step, writes);
  }
  return Row{.id = batch.request_ids[row],
             .slot = batch.request_pool_indices[row],
             .is_decode = true,
             .tokens = accepted};
}

int32_t SimulatedDevice::BlockAt(std::size_t group, const Step& step, int32_t slot) const {
  const auto& table = step.tables[group];
  Require(slot >= 0 && static_cast<std::size_t>(slot) < table.size() && table[static_cast<std::size_t>(slot)] > 0,
          "what a step reads or writes has a block");
  return table[static_cast<std::size_t>(slot)];
}

void SimulatedDevice::ComputeHistory(std::size_t group, const Step& step) {
  const CacheGroupConfig& spec = config_.cache_groups[group];
  const int32_t granularity = spec.block_granularity;
  const auto place = [&](int32_t position) {
    return std::tuple(group, BlockAt(group, step, position / granularity), position % granularity);
  };
  // Re-fed tokens only bring back the rows of replayable groups.
  for (int32_t position = step.begin - (spec.replayable ? step.replay : 0); position < step.end; ++position) {
    contents_[place(position)] = step.prints[static_cast<std::size_t>(position)];
  }
  const int32_t window = spec.IsSliding() ? *spec.sliding_window_tokens : step.end;
  for (int32_t position = std::max(0, step.begin - window + 1); position < step.end; ++position) {
    const auto found = contents_.find(place(position));
    Require(found != contents_.end(), "what a step reads has been written");
    Require(found->second == step.prints[static_cast<std::size_t>(position)], "a step reads its own prefix");
  }
}

void SimulatedDevice::Scan(std::size_t group, const Step& step, const std::map<int32_t, int32_t>& writes) {
  const int32_t granularity = config_.cache_groups[group].block_granularity;
  if (step.begin > 0) {
    const auto found = contents_.find({group, BlockAt(group, step, (step.begin - 1) / granularity), 0});
    Require(found != contents_.end(), "the snapshot that a step starts from has been written");
    Require(found->second == step.prints[static_cast<std::size_t>(step.begin) - 1], "a step starts from its own state");
  }
  for (const auto& [slot, tokens] : writes) {
    contents_[{group, BlockAt(group, step, slot), 0}] =
        tokens > 0 ? step.prints[static_cast<std::size_t>(tokens) - 1] : 0;
  }
}

}  // namespace tokenspeed::testing
