#include "tests/simulated_host.h"

#include "tests/simulated_device.h"

namespace tokenspeed::testing {

SimulatedHost::Copy SimulatedHost::CopyOf(const CacheOperations& operations, std::size_t index) {
  Copy copy;
  const std::vector<uint32_t>& groups = operations.group_ids[index];
  for (std::size_t block = 0; block < groups.size(); ++block) {
    copy.blocks.push_back({{groups[block], operations.src_pages[index][block]},
                           {groups[block], operations.dst_pages[index][block]}});
  }
  return copy;
}

SimulatedHost::Rows SimulatedHost::OnDevice(Block block) const {
  const CacheGroupConfig& group = config_.cache_groups[block.first];
  Rows rows;
  for (int32_t row = 0; row < (group.IsState() ? 1 : group.block_granularity); ++row) {
    const auto found = device_.find({block.first, block.second, row});
    Require(found != device_.end(), "what is copied to the host has been written");
    rows.push_back(found->second);
  }
  return rows;
}

std::vector<SimulatedHost::Rows> SimulatedHost::ReadSources(const Copy& copy) const {
  std::vector<Rows> read;
  for (const auto& [source, destination] : copy.blocks) read.push_back(OnDevice(source));
  return read;
}

void SimulatedHost::StartStores(const ExecutionPlan& plan) {
  if (!plan.write_back) return;
  for (std::size_t index = 0; index < plan.write_back->op_ids.size(); ++index) {
    Copy copy = CopyOf(*plan.write_back, index);
    if (!plan.write_back->source_pinned[index]) copy.read = ReadSources(copy);
    // Nobody may load what is being overwritten.
    for (const auto& [source, destination] : copy.blocks) blocks_.erase(destination);
    Require(under_way_.emplace(plan.write_back->op_ids[index], std::move(copy)).second, "an operation has a new id");
  }
}

void SimulatedHost::Load(const ExecutionPlan& plan) {
  if (!plan.load_back) return;
  for (std::size_t index = 0; index < plan.load_back->op_ids.size(); ++index) {
    Copy copy = CopyOf(*plan.load_back, index);
    copy.is_load = true;
    copy.read.emplace();
    for (const auto& [source, destination] : copy.blocks) {
      const auto found = blocks_.find(source);
      Require(found != blocks_.end(), "what is loaded has been stored");
      copy.read->push_back(found->second);
      for (std::size_t row = 0; row < found->second.size(); ++row) {
        device_[{destination.first, destination.second, static_cast<int32_t>(row)}] = found->second[row];
      }
      ++blocks_loaded_;
    }
    Require(under_way_.emplace(plan.load_back->op_ids[index], std::move(copy)).second, "an operation has a new id");
  }
}

std::vector<uint32_t> SimulatedHost::UnderWay() const {
  std::vector<uint32_t> ids;
  for (const auto& [id, copy] : under_way_) ids.push_back(id);
  return ids;
}

SchedulerEvent SimulatedHost::End(uint32_t op_id) {
  const Copy copy = std::move(under_way_.at(op_id));
  under_way_.erase(op_id);
  if (!copy.is_load) {
    const std::vector<Rows> read = copy.read ? *copy.read : ReadSources(copy);
    for (std::size_t block = 0; block < read.size(); ++block) blocks_[copy.blocks[block].second] = read[block];
    return WriteBackDoneEvent{op_id};
  }
  for (std::size_t block = 0; block < copy.blocks.size(); ++block) {
    const auto& [source, destination] = copy.blocks[block];
    Require(blocks_.contains(source) && blocks_.at(source) == copy.read->at(block), "the source of a load is kept");
    Require(OnDevice(destination) == copy.read->at(block), "the destination of a load is kept");
  }
  return LoadBackDoneEvent{op_id, true};
}

}  // namespace tokenspeed::testing
